"""The JAX backend: a stage's forward and backward as two compiled functions, the record between them on the device.

Needs the extra ``jax`` and no torch. `operators` joins the three tables of what each operator means; `program` traces a
graph with them, `optim` updates, `backend` is the door.
"""
