"""Trackers work without a network and without anyone's account."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the user's settings of trackers, and switch off what they send by themselves."""
    mlflow = ("TRACKING_URI", "EXPERIMENT_NAME", "HTTP_REQUEST_MAX_RETRIES", "HTTP_REQUEST_TIMEOUT")
    wandb = ("MODE", "PROJECT", "API_KEY")
    for name in [f"MLFLOW_{each}" for each in mlflow] + [f"WANDB_{each}" for each in wandb]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "wandb-cache"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
