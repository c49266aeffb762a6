"""Running the pipeline from outside: a `plan`, one stage (`run_stage`), all of them (`repro`, `pipeline`).

`repro` needs DVC and MLflow, `pipeline` also Prefect. Both run the stages of dvc.yaml through DVC, so plain
`dvc repro` stays the same pipeline.
"""
