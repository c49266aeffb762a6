-- Prefect and MLflow keep their tables apart.
CREATE DATABASE mlflow;
