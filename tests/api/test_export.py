import pytest

import fusionllm
from fusionllm.errors import UserError
from fusionllm.store.run_dir import RunDir


def test_a_run_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no run 'named'"):
        fusionllm.export("named", "out")
    RunDir.create(tmp_path / "runs", "named")
    with pytest.raises(UserError, match=r"no such file: .*runs/named/config.toml"):
        fusionllm.export("named", "out")
