"""The files of deploy/ for several machines: what they name is there, and other tools' schemas take them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml")

import typer
import yaml

from mint.cli.main import app

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "deploy"
KUBERAY, RAY, SKY, SLURM, ON_RAY = (
    FOLDER / name
    for name in ("kuberay/raycluster.yaml", "ray-cluster.yaml", "sky.yaml", "slurm.sbatch", "serve_on_ray.sh")
)
OPTIONS = {
    option
    for parameter in typer.main.get_command(app).commands["serve"].params  # type: ignore[attr-defined]
    for option in parameter.opts
}


@pytest.mark.parametrize(
    ("file", "command"),
    [(KUBERAY, "kubectl apply"), (RAY, "ray up"), (SKY, "sky launch"), (SLURM, "sbatch")],
    ids=["kuberay", "ray", "sky", "slurm"],
)
def test_each_begins_with_the_command_that_a_user_types_and_the_document_has_it(file: Path, command: str) -> None:
    comments = [line for line in file.read_text().splitlines() if line.startswith("#     ")]
    typed = comments[0].removeprefix("#     ")
    assert typed.startswith(command) and str(file.relative_to(ROOT)) in typed
    assert typed in (ROOT / "docs" / "cluster.md").read_text()


@pytest.mark.parametrize("file", [SLURM, ON_RAY, SKY], ids=lambda file: file.name)
def test_scripts_are_valid_and_start_the_server_with_options_that_it_has(file: Path, tmp_path: Path) -> None:
    scripts = [file.read_text()] if file != SKY else [yaml.safe_load(file.read_text())[key] for key in ("setup", "run")]
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    [served] = re.findall(r"mint serve (.*)", scripts[-1].replace("\\\n", " "))
    used = {word for word in served.split() if word.startswith("--")}
    assert {"--cluster", "--trainers", "--samplers"} <= used <= OPTIONS


def test_the_parts_of_the_kubernetes_file_fit_together() -> None:
    claim, service, cluster = yaml.safe_load_all(KUBERAY.read_text())
    head, [workers] = cluster["spec"]["headGroupSpec"], cluster["spec"]["workerGroupSpecs"]
    ray, server = head["template"]["spec"]["containers"]
    words = [*server["command"], *server["args"]]
    assert words[:2] == ["mint", "serve"]
    given = dict(zip(words[2::2], words[3::2], strict=True))
    assert given.keys() <= OPTIONS
    assert int(given["--trainers"]) + int(given["--samplers"]) <= workers["replicas"]
    assert int(given["--port"]) == service["spec"]["ports"][0]["targetPort"] == server["ports"][0]["containerPort"]
    assert service["spec"]["selector"]["ray.io/cluster"] == cluster["metadata"]["name"]
    [volume] = head["template"]["spec"]["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert server["volumeMounts"] == [{"name": volume["name"], "mountPath": "/data"}]
    containers = [ray, server, *workers["template"]["spec"]["containers"]]
    assert {container["image"] for container in containers} == {"mint:cluster"}, "deploy/Dockerfile, target cluster"
    secrets = [each["valueFrom"]["secretKeyRef"] for own in containers for each in own["env"] if "valueFrom" in each]
    assert secrets == 3 * [{"name": "mint-ray-token", "key": "token"}]
    for container in (ray, *workers["template"]["spec"]["containers"]):
        assert container["readinessProbe"]["exec"] == container["livenessProbe"]["exec"]
    threads = next(each["value"] for each in server["env"] if each["name"] == "MINT_THREADS")
    assert int(threads) <= int(workers["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"])


def test_the_kubernetes_file_keeps_to_the_schema_of_the_operator() -> None:
    """MINT_TEST_KUBERAY_CRD names config/crd/bases/ray.io_rayclusters.yaml of a release of KubeRay."""
    file = os.environ.get("MINT_TEST_KUBERAY_CRD")
    if file is None:
        pytest.skip("MINT_TEST_KUBERAY_CRD names no schema")
    jsonschema = pytest.importorskip("jsonschema")
    versions = yaml.safe_load(Path(file).read_text())["spec"]["versions"]
    [schema] = [each["schema"]["openAPIV3Schema"] for each in versions if each["name"] == "v1"]
    refuse_unknown_fields(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    validator = jsonschema.Draft202012Validator(schema)
    *_, cluster = yaml.safe_load_all(KUBERAY.read_text())
    assert list(validator.iter_errors(cluster)) == []
    cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["imagee"] = "a typo"
    assert len(list(validator.iter_errors(cluster))) == 1


def refuse_unknown_fields(schema: Any) -> None:
    """As `kubectl apply` does with its strict validation."""
    if isinstance(schema, list):
        for each in schema:
            refuse_unknown_fields(each)
    if not isinstance(schema, dict):
        return
    if schema.get("x-kubernetes-int-or-string"):
        schema.pop("type", None)
    free = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    if schema.get("type") == "object" and "properties" in schema and not free:
        schema["additionalProperties"] = False
    for each in list(schema.values()):
        refuse_unknown_fields(each)


def test_ray_takes_the_file_of_the_hosts() -> None:
    util = pytest.importorskip("ray.autoscaler._private.util", reason="pip install 'mint[cluster]'")
    config = yaml.safe_load(RAY.read_text())
    util.validate_config(util.prepare_config(config))
    mounted = config["file_mounts"]["~/mint-source"]
    assert (ROOT / mounted / ON_RAY.relative_to(ROOT)).is_file()
    started = next(shlex.split(line) for line in RAY.read_text().splitlines() if "ray exec" in line)
    assert started[-1] == f"bash ~/mint-source/{ON_RAY.relative_to(ROOT)}"
    with pytest.raises(Exception, match="head_ipp"):
        util.validate_config(util.prepare_config(config | {"head_ipp": "10.0.0.1"}))
