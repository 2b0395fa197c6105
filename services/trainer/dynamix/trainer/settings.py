"""Settings from the environment: our own, and what `torchrun` exports to its workers. Its only reader."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from dynamix.runtime.settings import BusSettings, SharedSettings, names_broker
from dynamix.runtime.settings import read as read_settings

from .job.identity import Launch


class TrainerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the training side: `DYNAMIX_TRAINER_...`."""

    name: str = "training"
    """Name of a job whose script gives none; `dynamix train` sets it to the script's file name."""
    run_id: str = ""
    """Ends the job's id, behind its name; `dynamix train` makes one."""
    policy: str = ""
    """Overrules the policy that the script names."""
    outbox_messages: Annotated[int, Meta(ge=2)] = 256
    """Messages kept while the bus is away; beyond it the oldest report is given up. At least 2."""
    gradient_servers: str = ""
    """Addresses of gradient servers, HOST:PORT with commas between them: they sum the job's gradients."""
    nodes: Literal["auto", "on", "off"] = "auto"
    """Ranks of a node sum gradients first; `auto`: where measured faster."""
    summary: bool = True
    """Whether rank 0 writes at the end, to stderr, what the job gained."""
    close_timeout_s: Annotated[float, Meta(ge=0)] = 2.0
    """Seconds that the end of training may wait until the last messages are sent."""


class Environment(NamedTuple):
    """Everything `attach` takes from the environment."""

    trainer: TrainerSettings
    shared: SharedSettings
    bus: BusSettings | None
    """`None` where no variable names a broker: the job then trains without one."""
    launch: Launch


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Settings from the environment, or another mapping. Raises SettingsError for a misspelt key or a bad value."""
    source = os.environ if environ is None else environ
    run_id = source.get("TORCHELASTIC_RUN_ID", "")
    # <directory of the launch>/attempt_<n>/<local rank>/error.json
    attempt = Path(source.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent
    return Environment(
        trainer=read_settings(TrainerSettings, "trainer", source),
        shared=read_settings(SharedSettings, "", source),
        bus=read_settings(BusSettings, "nats", source) if names_broker(source) else None,
        launch=Launch(
            run_id="" if run_id == "none" else run_id,
            restart_count=int(source.get("TORCHELASTIC_RESTART_COUNT", "0")),
            max_restarts=int(source.get("TORCHELASTIC_MAX_RESTARTS", "0")),
            world_size=int(source.get("WORLD_SIZE", "1")),
            elastic="TORCHELASTIC_RUN_ID" in source,
            connects_late=source.get("TORCH_GLOO_LAZY_INIT", "0").lower() in ("1", "true", "yes", "on"),
            group=source.get("GROUP_RANK", ""),
            log_directory=str(attempt.parent) if attempt.name.startswith("attempt_") else "",
        ),
    )
