"""The options of `attach`, checked where they are given."""

import hashlib
import logging
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch

from dynamix.runtime.extensions import extension_names
from dynamix.schemas.messages import OptimizerFamily
from dynamix.schemas.messages.allocation import (
    EXACT,
    LOSSY_CODECS,
    ROUTES,
    SERVERS,
    Allocation,
    Exchange,
    ExchangePermission,
    Explored,
    GlobalBatch,
    is_permitted,
)
from dynamix.schemas.policies import (
    DEFAULT_POLICY,
    EXCHANGE_POLICIES,
    KEEPS_GLOBAL_BATCH,
    OUR_POLICIES,
    POLICY_OPTIONS,
    RECURRING,
    SPLIT_POLICY,
    STIGMERGY,
    PolicyOptions,
    check_options,
    initial_exchange,
    initial_split,
    option_value,
)
from dynamix.schemas.spelling import nearest
from dynamix.schemas.subjects import is_token
from dynamix.trainer.arguments import AtLeast0, AtLeast1, checked
from dynamix.trainer.exchange.plan import CODECS, GROUP, exchange_codec
from dynamix.trainer.exchange.rows import table_share
from dynamix.trainer.exchange.servers import split_address
from dynamix.trainer.gradient.hook import Reduction
from dynamix.trainer.gradient.learning_rate import Rule
from dynamix.trainer.gradient.models import Averaging, is_replicated, is_sharded
from dynamix.trainer.measurement.memory import MOST_TIMES, NUM_STEPS

_log = logging.getLogger("dynamix.trainer")

WINDOW_STEPS = 10
MIN_WINDOW_S = 1.0
"""Windows of a script that does not say how long they are, with divisors for periods of local steps. Their end
costs some 6 ms of a processor on each host, 1 to 2 % of a second on half of one (docs/measurements.md)."""

ADAPTIVE = ("adam", "adagrad", "adadelta", "rmsprop", "adafactor", "lamb", "novograd", "shampoo", "yogi")
"""Parts of class names of optimizers that divide by a running gradient norm."""


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The steering of a job; all ranks hold the same. Fields that `attach` has are described there."""

    local_batch_sizes: tuple[AtLeast0, ...]
    base_global_batch_size: AtLeast1
    window_steps: AtLeast1
    """Optimizer steps of a window, or of a part of it."""
    min_local_batch_size: AtLeast0
    max_local_batch_size: AtLeast1
    max_lag_windows: AtLeast1
    margin_steps: int
    """Steps between an action's broadcast and the boundary at which it takes effect."""
    policy: str
    policy_options: PolicyOptions
    optimizer_family: OptimizerFamily
    learning_rate_rule: Rule
    reduction: Reduction
    seed: AtLeast0
    shuffle: bool
    drop_last: bool
    noise_every: AtLeast1
    global_batch: GlobalBatch = "adaptive"
    micro_batch_size: AtLeast1 | None = None
    gradient_accumulation_steps: AtLeast1 = 1
    supports_tracking: bool = False
    """Whether the ranks can divide a global batch among themselves, and exchange gradients in other ways."""
    exchange: ExchangePermission = "exact"
    fixed_exchange: Exchange | None = None
    """The exchange of the whole run, if the script sets it."""
    gradient_servers: tuple[str, ...] = ()
    """Addresses of the servers that it was started with."""
    supports_exchange: bool = False
    """Whether the ranks carry out decisions on the gradient exchange."""
    table_share: float = 0.0
    """Share of the trained numbers that lie in embedding tables."""
    family: str = ""
    explores: tuple[Explored, ...] = ()
    min_window_s: float = 0.0
    """A window that would last less is several times as long, after the first ones."""

    @property
    def initial_allocation(self) -> Allocation:
        """The allocation of the first step; if ranks divide the batch themselves, they do so at once."""
        split = initial_split(self.policy, self.policy_options, supports_tracking=self.supports_tracking)
        first = self.fixed_exchange or initial_exchange(self.policy, self.policy_options)
        return Allocation(self.local_batch_sizes, split, first)

    @property
    def accumulates(self) -> bool:
        """Whether a step may have several batches."""
        return self.micro_batch_size is not None or self.gradient_accumulation_steps > 1

    @property
    def named_codecs(self) -> list[str]:
        """Exchange codecs of extensions that the policy's options name."""
        names = {value for value in self.policy_options.values() if isinstance(value, str)} - set(CODECS)
        return [name for name in extension_names(GROUP) if name in names] if names else []

    def __post_init__(self) -> None:
        """Check all options. Raises ValueError for what cannot work, naming the value, the limit and how to fix it."""
        for name, hint in get_type_hints(JobOptions, include_extras=True).items():
            object.__setattr__(self, name, checked(name, getattr(self, name), hint))
        if self.min_local_batch_size > self.max_local_batch_size:
            raise ValueError(
                f"bounds [{self.min_local_batch_size}, {self.max_local_batch_size}] hold no batch size: "
                "use 0 <= min_local_batch_size <= max_local_batch_size"
            )
        for rank, size in enumerate(self.local_batch_sizes):
            if not self.min_local_batch_size <= size <= self.max_local_batch_size:
                raise ValueError(
                    f"local_batch_size={size} of rank {rank} is outside "
                    f"[{self.min_local_batch_size}, {self.max_local_batch_size}]: "
                    "pass min_local_batch_size or max_local_batch_size to attach"
                )
        if self.gradient_accumulation_steps > 1 and self.micro_batch_size is not None:
            raise ValueError(
                "micro_batch_size and gradient_accumulation_steps exclude each other: drop gradient_accumulation_steps "
                "and do not divide the loss, or drop micro_batch_size and divide it by gradient_accumulation_steps"
            )
        shortest = 1 + -(-self.margin_steps // self.window_steps)  # an action is known one window after its own
        if shortest > self.max_lag_windows:
            spare = 2 if self.exchange == "exact" else 3
            raise ValueError(
                f"window_steps={self.window_steps} is too short for a loader that draws {self.margin_steps - spare} "
                f"batches ahead: an action would be {shortest} windows old, max_lag_windows={self.max_lag_windows}; "
                "use longer windows or less num_workers * prefetch_factor"
            )
        if self.explores and not self.family:
            raise ValueError(
                f"explores={list(self.explores)} is between the runs of a family: add family='auto', or a name"
            )
        self._check_policy()
        self._check_exchange()

    @property
    def fingerprint(self) -> dict[str, object]:
        """Values that must be equal on all ranks, by the argument's name in `attach` where it has one."""
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "min_window_s"}
        return own | {
            "window_steps": None if self.min_window_s else self.window_steps,
            "policy_options": dict(self.policy_options),
        }

    def _check_policy(self) -> None:
        if not is_token(self.policy):
            raise ValueError(
                f"policy={self.policy!r}: a policy's name has 1 to 63 of the characters a-z, 0-9 and '-'; pass its "
                "options as policy_options={...}"
            )
        for name, value in self.policy_options.items():
            if not (is_token(value) if isinstance(value, str) else math.isfinite(value)):
                raise ValueError(
                    f"policy_options[{name!r}]={value!r}: pass a finite number, or a name of 1 to 63 of the characters "
                    "a-z, 0-9 and '-'"
                )
        if (known := POLICY_OPTIONS.get(self.policy)) is not None:
            check_options(self.policy, known, self.policy_options)
        if self.policy == STIGMERGY and not self.supports_tracking and len(self.local_batch_sizes) > 1:
            raise ValueError(
                f"policy {STIGMERGY!r} needs the compute time of each rank, which only our own communication hook "
                'measures: use weighting="hook" on a DistributedDataParallel model, without base_hook, or '
                "another policy"
            )

    def _check_exchange(self) -> None:
        for name in self.named_codecs:
            if self.exchange == "exact" and not exchange_codec(name).is_lossless:
                raise ValueError(
                    f"policy option codec={name}: it rounds gradients, which this job does not permit: "
                    'attach(exchange="lossy")'
                )
        first, asked = self.initial_allocation.exchange, initial_exchange(self.policy, self.policy_options)
        if self.fixed_exchange is not None and asked not in (EXACT, first):
            raise ValueError(
                f"policy {self.policy!r} with its options asks for gradients {asked.label}, but the whole run "
                f"exchanges them {first.label}: leave these options out, or use another policy"
            )
        outer = self.policy_options.keys() & {"outer_rate", "outer_momentum"}
        if self.policy in EXCHANGE_POLICIES and asked.every == 1 and outer:
            raise ValueError("options outer_rate and outer_momentum are of rounds of local steps: add every=2 or more")
        if first.shares and first.route not in ("shares", SERVERS):
            raise ValueError(f"shares={list(first.shares)[:16]} are of the route 'shares': add route='shares'")
        if first == EXACT:
            return
        exchange_codec(first.codec)  # raises for an unknown one
        is_served = first.route == SERVERS and bool(self.gradient_servers)
        if not (first.route in ROUTES or is_served):
            raise ValueError(f"exchange {first.label}: use one of the routes {', '.join(ROUTES)}")
        named = self.named_codecs
        if self.fixed_exchange is None and not is_permitted(first, self.exchange, named):
            needed = next(each for each in get_args(ExchangePermission) if is_permitted(first, each, named))
            raise ValueError(
                f"the options of policy {self.policy!r} ask for gradients {first.label}, which this job does not "
                f'permit: attach(exchange="{needed}")'
            )
        num_ranks, num_servers = len(self.local_batch_sizes), len(self.gradient_servers) if is_served else 0
        if len(first.shares) not in (0, num_ranks + num_servers):
            servers = (
                f" and {num_servers} servers: one per rank, then one per server" if is_served else ": one per rank"
            )
            raise ValueError(f"{len(first.shares)} shares for {num_ranks} ranks{servers}, or none")


def options_of(
    given: Mapping[str, Any],
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    averaging: Averaging,
    world_size: int,
    margin_steps: int,
    policy: str,
    gradient_servers: str,
) -> JobOptions:
    """The options that `attach` was `given` by its argument's names, with what follows from models and environment.

    `margin_steps` are those between a broadcast and its effect that prefetching demands; `policy` and
    `gradient_servers` are the environment's.

    Raises:
        ValueError: for what cannot work.
    """
    exchange, servers = served_exchange(given["exchange"], gradient_servers)
    has_copies = averaging == "hook" and all(map(is_replicated, models))
    if servers and any(map(is_sharded, models)):
        raise ValueError("gradient servers need DistributedDataParallel models: a shard is summed over its copies")
    _check_hooks(given, averaging, models, optimizers, exchange)
    sizes = checked("local_batch_size", given["local_batch_size"], AtLeast0 | tuple[AtLeast0, ...])
    sizes = (sizes,) * world_size if isinstance(sizes, int) else sizes
    if len(sizes) != world_size:
        raise ValueError(f"local_batch_size holds {len(sizes)} sizes for {world_size} ranks")
    if sum(sizes) < 1:
        raise ValueError(f"local_batch_size={sizes!r}: pass at least 1; in a list a rank may have 0 beside others")
    global_batch, base_global_batch_size = given["global_batch"], given["base_global_batch_size"]
    num_batches = given["gradient_accumulation_steps"]
    lower, upper, window_steps = (
        given[name] for name in ("min_local_batch_size", "max_local_batch_size", "window_steps")
    )
    if lower is None:  # no size is too small for speed: policies that fit times do not go below what pays
        batch_norm = torch.nn.modules.batchnorm._BatchNorm  # noqa: SLF001 - what all kinds of it share
        has_batch_norm = any(isinstance(module, batch_norm) for model in models for module in model.modules())
        lower = min(*sizes, num_batches * (2 if has_batch_norm else 1))
    if upper == AUTO:
        upper = MOST_TIMES * max(sizes)
        if given["micro_batch_size"] is not None or (window_steps or NUM_STEPS) < NUM_STEPS:
            raise ValueError('max_local_batch_size="auto": use window_steps=3 or more, and micro_batch_size without it')
    if upper is None:  # with a fixed global batch the memory that the script was written for is near
        upper = max(*sizes, 1024) if global_batch == "adaptive" else 2 * max(sizes)
    margin_steps += exchange in ("lossy", "local")
    is_ours = averaging == "hook" and given["base_hook"] is None
    policy_options = checked("policy_options", given["policy_options"] or {}, dict[str, float | str])
    derived = {
        "local_batch_sizes": sizes,
        "base_global_batch_size": sum(sizes) if base_global_batch_size is None else base_global_batch_size,
        "window_steps": WINDOW_STEPS * -(-margin_steps // WINDOW_STEPS) if window_steps is None else window_steps,
        "min_window_s": MIN_WINDOW_S if window_steps is None else 0.0,
        "min_local_batch_size": lower,
        "max_local_batch_size": upper,
        "margin_steps": margin_steps,
        "policy": policy or given["policy"] or (SPLIT_POLICY if global_batch == "fixed" else DEFAULT_POLICY),
        "policy_options": {
            name: option_value(value) if isinstance(value, str) else value for name, value in policy_options.items()
        },
        "optimizer_family": "adam" if _is_adaptive(optimizers[0]) else "sgd",
        "supports_tracking": is_ours,
        "supports_exchange": is_ours and has_copies and not isinstance(exchange, Exchange),
        "exchange": "exact" if isinstance(exchange, Exchange) else exchange,
        "fixed_exchange": exchange if isinstance(exchange, Exchange) else None,
        "gradient_servers": servers,
        "table_share": table_share(models),
        "family": job_family(given["family"], models, optimizers, given["dataset"], given["learning_rate_rule"]),
    }
    return JobOptions(**{each.name: given[each.name] for each in fields(JobOptions) if each.name in given} | derived)


def _check_hooks(
    given: Mapping[str, Any],
    averaging: Averaging,
    models: Sequence[torch.nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
    exchange: ExchangePermission | Exchange,
) -> None:
    """Raise ValueError for what the communication hook cannot carry out, saying how to fix it."""
    base_hook = given["base_hook"]
    if not (base_hook is None or callable(base_hook)):
        raise TypeError(f"base_hook={base_hook!r}: pass a DDP communication hook, or leave it out")
    if base_hook is not None and (averaging != "hook" or any(map(is_sharded, models))):
        raise ValueError(
            'base_hook is for DistributedDataParallel and weighting="hook": register it on the model yourself'
        )
    if base_hook is not None and len(models) > 1:
        raise ValueError("base_hook belongs to one model: attach one model with it, without a list")
    what = f"exchange={exchange.label if isinstance(exchange, Exchange) else exchange!r}"
    if exchange not in ("exact", EXACT) and averaging == "loss":
        raise ValueError(
            f'{what} needs weighting="hook" on a DistributedDataParallel model: FSDP and frameworks that '
            "average gradients exchange them on their own"
        )
    if exchange not in ("exact", EXACT) and averaging == "hook" and not all(map(is_replicated, models)):
        raise ValueError(
            f"{what}: FSDP2 sends these gradients itself; for a hook between the nodes shard inside of each, "
            'fully_shard(model, mesh=mesh["shard"]) with init_device_mesh("cpu", (nodes, ranks), mesh_dim_names='
            '("node", "shard"))'
        )
    if exchange not in ("exact", EXACT) and base_hook is not None:
        raise ValueError(f"{what} and a base_hook exclude each other: what the hook sends is its own")
    if exchange == "local" or (isinstance(exchange, Exchange) and exchange.every > 1):
        _check_local_steps(given, optimizers, exchange)


def _check_local_steps(
    given: Mapping[str, Any], optimizers: Iterable[torch.optim.Optimizer], exchange: ExchangePermission | Exchange
) -> None:
    if given["count_tokens"] is not None:
        raise ValueError(
            "local steps and count_tokens exclude each other, since all ranks must know what counts: pass token_counts"
        )
    for optimizer in optimizers:
        names = [cls.__name__ for cls in type(optimizer).__mro__]
        if "ZeroRedundancyOptimizer" in names:
            raise ValueError(
                f"local steps need optimizers that update all parameters on every rank, not {names[0]}: use the "
                'optimizer itself, or exchange="lossy"'
            )
        is_adam = "adam" in " ".join(names).lower().replace("adamax", "")
        if exchange == "local" and _is_adaptive(optimizer) and not is_adam:
            raise ValueError(
                f"decisions take local steps with SGD and Adam: those of {names[0]} would shrink by one rank's noise; "
                'use AdamW, exchange="lossy", or exchange=Exchange(every=4) to take them anyway'
            )


def _is_adaptive(optimizer: torch.optim.Optimizer) -> bool:
    return any(kind in cls.__name__.lower() for cls in type(optimizer).__mro__ for kind in ADAPTIVE)


def warn_of_policy(options: JobOptions) -> None:
    """Warn of a policy that is not ours, and of one that will not do all that it does elsewhere; once per job."""
    policy = options.policy
    if policy not in OUR_POLICIES:
        near = nearest(policy, OUR_POLICIES)
        _log.warning(
            "policy %r is not one of ours%s: the job is steered only if the arbitrator has a learned policy of that "
            "name, or one of another package",
            policy,
            f" (did you mean {near!r}?)" if near else f" ({', '.join(sorted(OUR_POLICIES))})",
        )
    elif options.global_batch == "fixed" and policy not in KEEPS_GLOBAL_BATCH:
        _log.warning(
            "policy %r may change the global batch, but it is fixed at %d: only its division will follow the "
            "decisions; attach(global_batch='adaptive') lets the policy change it",
            policy,
            sum(options.local_batch_sizes),
        )
    if options.family and policy in OUR_POLICIES - RECURRING:
        _log.warning(
            "policy %r leaves nothing to later runs of the family %r, and begins with nothing: %s does, which moves "
            "the global batch (global_batch='adaptive')",
            policy,
            options.family,
            ", ".join(map(repr, sorted(RECURRING))),
        )


def warn_of_missing_bus(options: JobOptions) -> None:
    """Warn of a job without a bus whose policy needs one; under `split` the ranks divide the batch on their own."""
    policy, divides = options.policy, options.initial_allocation.split == "tracking"
    if policy == "static" or (policy == SPLIT_POLICY and (divides or len(options.local_batch_sizes) == 1)):
        return
    _log.warning(
        "policy %r decides in a service, and no DYNAMIX_NATS_... variable names a broker: %s; start `dynamix up`, and "
        "the script with `dynamix train`, or pass connect=False to train without decisions",
        policy,
        "the ranks only divide the batch by their speeds" if divides else "the batch sizes stay as they are",
    )


def warn_of_momentum(options: JobOptions, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Warn of two momenta, one in the steps and one between the averagings; once per job."""
    exchange = options.initial_allocation.exchange
    factor = exchange.outer_rate / (1.0 - exchange.outer_momentum)
    if factor > 2.0 and any(group.get("momentum") for each in optimizers for group in each.param_groups):
        _log.warning(
            "outer_rate=%g with outer_momentum=%g moves %.1f times as far as a round, and with the momentum of the "
            "optimizer that can train much worse: use outer_rate=0, which adapts, or a momentum-free optimizer",
            exchange.outer_rate,
            exchange.outer_momentum,
            factor,
        )


SERVED_CODECS = ("none", "rows")
"""Codecs whose sums owners without a gradient of their own can make."""
VARIABLE = "DYNAMIX_TRAINER_GRADIENT_SERVERS"


def served_exchange(
    exchange: ExchangePermission | Exchange, named: str
) -> tuple[ExchangePermission | Exchange, tuple[str, ...]]:
    """The requested exchange, over the servers that the environment has `named`, and their addresses.

    Raises:
        ValueError: for a bad address, or when the exchange asks for something that servers cannot do, or for servers
            without any.
    """
    servers = tuple(part.strip() for part in named.split(",") if part.strip())
    for address in servers:
        split_address(address)
    if len(set(servers)) < len(servers):
        raise ValueError(f"{VARIABLE}={named}: each server once")
    asks = isinstance(exchange, Exchange) and exchange.route == SERVERS
    if not servers:
        if asks:
            raise ValueError(
                f"the route {SERVERS!r} needs gradient servers: start `dynamix serve-gradients` and name the "
                f"addresses in {VARIABLE}=HOST:PORT,..."
            )
        return exchange, servers
    if exchange == "exact":
        return Exchange(route=SERVERS), servers
    if not isinstance(exchange, Exchange) or not asks:
        shown = exchange.label if isinstance(exchange, Exchange) else repr(exchange)
        raise ValueError(
            f"exchange={shown} and gradient servers exclude each other, since no decision uses them: pass "
            f"Exchange(route={SERVERS!r}, ...), leave exchange out, or start the job without {VARIABLE}"
        )
    if exchange.codec not in SERVED_CODECS:
        reason = "servers keep no residuals" if exchange.codec in LOSSY_CODECS else "servers cannot sum what it sends"
        raise ValueError(
            f"exchange={exchange.label}: {reason}; use one of the codecs {', '.join(SERVED_CODECS)}, or the route "
            "'shares'"
        )
    return exchange, servers


AUTO = "auto"
MOST_LETTERS = 48
"""Most of the script's name in the family's."""


def job_family(
    family: str | None,
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    dataset: object,
    *further: object,
) -> str:
    """The family by its given name, or under `auto` by the script's name and a fingerprint; empty for none.

    The fingerprint is of model (class and shapes), optimizer (class and settings), data set (class and length) and
    `further`. What a run can do at another size of the cluster is not part of it.

    Raises:
        ValueError: for a name that cannot be part of a subject.
    """
    if family is None or family == "":
        return ""
    if family != AUTO:
        if isinstance(family, str) and is_token(family):
            return family
        raise ValueError(f"family={family!r}: use {AUTO!r}, or 1 to 63 of the characters a-z, 0-9 and '-'")
    parts: list[object] = []
    for model in models:
        inner = model.module if isinstance(getattr(model, "module", None), torch.nn.Module) else model
        assert isinstance(inner, torch.nn.Module), "a model is one"
        shapes = [tuple(parameter.shape) for parameter in inner.parameters() if parameter.requires_grad]
        parts.append((type(inner).__qualname__, *shapes))
    for optimizer in optimizers:
        settings = [(k, v) for k, v in sorted(optimizer.defaults.items()) if isinstance(v, bool | int | float | tuple)]
        parts.append((type(optimizer).__qualname__, *settings))
    parts.append((type(dataset).__qualname__, len(dataset) if isinstance(dataset, Sized) else None))
    digest = hashlib.sha256(repr((*parts, *further)).encode()).hexdigest()[:8]
    script = re.sub("[^a-z0-9]+", "-", Path(sys.argv[0]).stem.lower()).strip("-")[:MOST_LETTERS]
    return f"{script or 'training'}-{digest}"
