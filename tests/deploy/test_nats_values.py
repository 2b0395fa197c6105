"""The values of the NATS chart: only what the chart knows, and a configuration that a real nats-server takes."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
from tests.support.deployed_broker import DEPLOY
from tests.support.manifests import KUBERNETES, documents

from dynamix.runtime.embedded import server_binary

SCHEMA = json.loads((Path(__file__).parent / "nats-values.schema.json").read_text())
(VALUES,) = documents("nats-values.yaml")


def configuration(directory: Path) -> str:
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
    tls = values["nats"]["tls"]
    assert tls["enabled"]
    place = "/etc/nats-certs/nats"
    files = {"cert_file": f"{place}/tls.crt", "key_file": f"{place}/tls.key"}
    whole["tls"] = {**files, "ca_file": str(directory / "ca.pem"), **tls["merge"]}
    numbers = range(values["cluster"]["replicas"])
    routes = [f"tls://dynamix-nats-{number}.dynamix-nats-headless:6222" for number in numbers]
    whole["cluster"] = {"name": "dynamix-nats", "port": 6222, "no_advertise": True, "routes": routes}
    assert values["cluster"]["tls"] == {"enabled": True, "secretName": "dynamix-nats-tls"}
    whole["cluster"]["tls"] = {**files, "ca_file": str(directory / "ca.pem")}
    text = json.dumps(whole, indent=2, sort_keys=True)
    text = re.sub(r'".*\$include": "(.*)",?', r"include \1;", text)
    return re.sub(r'"<<\s+(.*?)\s+>>"', r"\1", text)


def test_the_values_follow_the_schema() -> None:
    jsonschema.validate(VALUES, SCHEMA)


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


def test_a_real_server_takes_the_configuration_that_the_chart_makes(tmp_path: Path) -> None:
    """The same files, variables and places; only the folders of the pod are below the test's."""
    subprocess.run(
        ["sh", str(DEPLOY / "make-secrets.sh"), str(tmp_path), "dynamix-nats.dynamix", "*.dynamix-nats-headless"],
        env={**os.environ, "DYNAMIX": f"{sys.executable} -m dynamix.cli.main"},
        check=True,
        capture_output=True,
    )
    merged = r"configMap\.merge\.data\.(\w+)\\\.conf=(\S+)'"  # by the command in the values' head
    named = dict(re.findall(merged, (KUBERNETES / "nats-values.yaml").read_text()))
    assert named == {"dynamix": "deploy/nats.conf", "accounts": "deploy/kubernetes/base/secrets/accounts.conf"}
    shutil.copy(DEPLOY / "nats.conf", tmp_path / "dynamix.conf")
    certificates = "/etc/nats-certs/nats"
    text = configuration(tmp_path).replace('"/data', f'"{tmp_path}/data')
    (tmp_path / "chart.conf").write_text(text.replace(certificates, str(tmp_path / "tls")))
    for name, file in (("tls.crt", "certificate.pem"), ("tls.key", "key.pem")):
        (tmp_path / "tls" / file).rename(tmp_path / "tls" / name)
    variables = {
        name: value.replace(certificates, str(tmp_path / "tls"))
        for name, value in VALUES["container"]["env"].items()
        if name.startswith("NATS_")
    }
    environ = {**variables, "SERVER_NAME": "dynamix-nats-0"}
    command = [str(server_binary()), "-t", "-c", str(tmp_path / "chart.conf")]
    told = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (told.returncode, "is valid" in told.stderr) == (0, True), told.stderr
