"""VTAB-1k: nineteen small tasks from one set of weights, as one command.

`units` says what there is to do and where its results lie, `splits` which data
a stage may read, `tuning` and `probe` how one unit is measured, `sweep` walks
through all of them, `report` shows what came out. `input_pipeline.vtab` has the
tasks themselves.
"""
