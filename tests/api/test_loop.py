import asyncio

from fusionllm.api.loop import LoopThread


def test_closing_lets_what_still_runs_clean_up(caplog):
    loop, steps = LoopThread("test"), []
    loop.start()

    async def work():
        try:
            steps.append("begun")
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            steps.append("cleaned up")

    running = loop.submit(work())
    loop.submit(asyncio.sleep(0)).result(5)
    loop.close()
    assert steps == ["begun", "cleaned up"] and running.cancelled() and not loop.running
    assert "Task was destroyed" not in caplog.text
    loop.close()
