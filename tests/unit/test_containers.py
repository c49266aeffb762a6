"""The container files, checked without an engine: they parse, and all that they name exists."""

from __future__ import annotations

from importlib import metadata, util
from pathlib import Path
import re
import shlex

from dockerfile_parse import DockerfileParser
import pytest

from stages.params import ROOT, read_yaml

DOCKER = ROOT / "docker"
FILES = sorted(DOCKER.glob("*.Dockerfile"))
KNOWN = {
    "FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "VOLUME", "ENTRYPOINT", "CMD",
}  # fmt: skip


def parsed(path: Path) -> list[dict]:
    parser = DockerfileParser(path=str(path))
    return [step for step in parser.structure if step["instruction"] != "COMMENT"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_dockerfile_is_sound(path: Path):
    steps = parsed(path)
    assert steps[0]["instruction"] == "FROM" and {step["instruction"] for step in steps} <= KNOWN
    assert re.search(r":[\w.-]*\d", steps[0]["value"]), "the base image has no version"
    assert steps[-1]["instruction"] == "CMD" and steps[-2]["instruction"] == "ENTRYPOINT"
    users = [step["value"] for step in steps if step["instruction"] == "USER"]
    assert users and users[-1] != "root"
    for step in steps:
        if step["instruction"] == "RUN":
            for part in step["value"].split("&&"):
                assert shlex.split(part), "an empty command"
            if "apt-get install" in step["value"]:
                assert "--no-install-recommends" in step["value"]
                assert "rm -rf /var/lib/apt/lists/*" in step["value"]
        if step["instruction"] == "COPY":
            *sources, _ = step["value"].split()
            assert all((ROOT / source).exists() for source in sources)
        for name in re.findall(r"--requirement (\S+)", step["value"]):
            assert (ROOT / name).is_file()


def test_images_install_before_they_copy_the_code():
    """So that a changed line of code does not install everything anew."""
    for path in FILES:
        steps = parsed(path)
        code = next(i for i, step in enumerate(steps) if step["value"].split() == [".", "."])
        assert any("--requirement requirements/core.lock" in step["value"] for step in steps[:code])


def test_compose_names_what_exists():
    compose = read_yaml(DOCKER / "compose.yaml")
    services = compose["services"]
    assert {"prefect", "mlflow", "deploy", "worker-cpu", "worker-gpu"} <= set(services)
    for name, service in services.items():
        assert set(service.get("depends_on", {})) <= set(services), name
        if build := service.get("build"):
            assert (DOCKER / build["context"] / build["dockerfile"]).resolve() in FILES
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name} listens to the world"
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (DOCKER / source).is_file(), volume
        for upper, wanted in service.get("depends_on", {}).items():
            if wanted["condition"] == "service_healthy":
                assert "healthcheck" in services[upper], f"{name} waits for the health of {upper}"
    text = (DOCKER / "compose.yaml").read_text()
    assert not re.search(r"PASSWORD: (?!\$)", text), "a password is written down"


def test_entrypoints_of_the_deployments_can_be_imported():
    deployments = read_yaml(ROOT / "prefect.yaml")
    assert deployments["prefect-version"] == metadata.version("prefect")
    seen = set()
    for deployment in deployments["deployments"]:
        module, _, flow = deployment["entrypoint"].rpartition(".")
        spec = util.find_spec(module)
        assert spec and spec.origin and f"def {flow}(" in Path(spec.origin).read_text()
        assert deployment["work_pool"]["name"] in ("cpu", "gpu")
        assert not any(schedule["active"] for schedule in deployment.get("schedules", []))
        key = (deployment["entrypoint"], deployment["name"])
        assert key not in seen
        seen.add(key)
