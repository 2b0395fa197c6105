"""The options of `attach`, checked where they are given."""

import hashlib
import logging
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import torch
from msgspec import Meta

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
    Objective,
    is_permitted,
)
from dynamix.schemas.policies import (
    DEFAULT_POLICY,
    EXCHANGE_POLICIES,
    KEEPS_GLOBAL_BATCH,
    OUR_POLICIES,
    RECURRING,
    SPLIT_POLICY,
    STIGMERGY,
    PolicyOptions,
    initial_exchange,
    initial_split,
)
from dynamix.schemas.spelling import nearest
from dynamix.schemas.subjects import is_token
from dynamix.trainer.arguments import (
    check_choice,
    check_policy_options,
    checked,
    names_of,
    policy_options_of,
    sizes_of,
    whole_number,
)
from dynamix.trainer.exchange.codecs import CODECS, GROUP, exchange_codec
from dynamix.trainer.exchange.rows import table_share
from dynamix.trainer.exchange.servers import split_address
from dynamix.trainer.gradient.hook import BaseHook, Reduction
from dynamix.trainer.gradient.learning_rate import Rule
from dynamix.trainer.gradient.models import Averaging

_log = logging.getLogger("dynamix.trainer")

WINDOW_STEPS = 10
MIN_WINDOW_S = 1.0
"""Windows of a script that does not say how long they shall be, with divisors for periods of local steps. Their end
costs some 6 ms of a processor on each host, 1 to 2 % of a second on half of one (docs/measurements.md)."""

AtLeast0 = Annotated[int, Meta(ge=0)]
AtLeast1 = Annotated[int, Meta(ge=1)]

ADAPTIVE = ("adam", "adagrad", "adadelta", "rmsprop", "adafactor", "lamb", "novograd", "shampoo", "yogi")
"""Parts of class names of optimizers that divide by a running gradient norm."""


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The steering of a job; all ranks hold the same."""

    local_batch_sizes: tuple[int, ...]
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
    """Whether an epoch ends before a step that it cannot fill."""
    noise_every: AtLeast1
    """Steps between two measurements of the gradient noise."""
    noise_decay: Annotated[float, Meta(ge=0, lt=1)]
    global_batch: GlobalBatch = "adaptive"
    """Whether decisions may change the sum of the sizes."""
    micro_batch_size: AtLeast1 | None = None
    """Most samples that a rank computes one gradient on."""
    gradient_accumulation_steps: AtLeast1 = 1
    """Gradients that a rank computes in a step, each of a loss divided by it."""
    supports_tracking: bool = False
    """Whether the ranks can divide a global batch among themselves."""
    exchange: ExchangePermission = "exact"
    """What decisions may do to the gradient exchange."""
    fixed_exchange: Exchange | None = None
    """The exchange of the whole run, if the script sets it."""
    gradient_servers: tuple[str, ...] = ()
    """Addresses of the servers that it was started with."""
    supports_exchange: bool = False
    """Whether the ranks can carry out any such decision."""
    table_share: float = 0.0
    """Share of the trained numbers that lie in embedding tables."""
    family: str = ""
    """The family of the job's runs; empty if none."""
    explores: tuple[Explored, ...] = ()
    """Quantities that runs of the family may try out."""
    objective: Objective = "time"
    """Quantity by which runs are compared."""
    min_window_s: float = 0.0
    """A window that would last less is several times as long, after the first ones."""

    @property
    def initial_allocation(self) -> Allocation:
        """The allocation of the first step; if ranks divide the batch themselves, they do so at once."""
        split = initial_split(self.policy, self.policy_options, supports_tracking=self.supports_tracking)
        first = self.fixed_exchange or initial_exchange(self.policy, self.policy_options)
        return Allocation(self.local_batch_sizes, split, first)

    @property
    def named_codecs(self) -> list[str]:
        """Exchange codecs of extensions that the policy's options name."""
        names = {value for value in self.policy_options.values() if isinstance(value, str)} - set(CODECS)
        return [name for name in extension_names(GROUP) if name in names] if names else []

    @property
    def base_batch_size(self) -> float:
        """Samples of one batch of one rank, as the script was written: a step has N where it divides each loss by N."""
        return self.base_global_batch_size / len(self.local_batch_sizes) / self.gradient_accumulation_steps

    def __post_init__(self) -> None:
        """Check all options.

        Raises:
            TypeError: for what is of another type than the option.
            ValueError: for what cannot work; each text names the value, the limit and how to fix it.
        """
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
        if sum(self.local_batch_sizes) < 1:
            raise ValueError("a step needs at least one sample over all ranks")
        if self.gradient_accumulation_steps > 1 and self.micro_batch_size is not None:
            raise ValueError(
                "micro_batch_size and gradient_accumulation_steps exclude each other: drop gradient_accumulation_steps "
                "and do not divide the loss, or drop micro_batch_size and divide it by gradient_accumulation_steps"
            )
        if not (isinstance(self.policy, str) and is_token(self.policy)):
            raise ValueError(
                f"policy={self.policy!r}: a policy's name has 1 to 63 of the characters a-z, 0-9 and '-'; pass its "
                "options as policy_options={...}"
            )
        check_policy_options(self.policy, self.policy_options)
        self._check_explores()
        self._check_exchange()
        self._check_lag()
        self._check_traces()

    @property
    def fingerprint(self) -> dict[str, object]:
        """Values that must be equal on all ranks, by the argument's name in `attach` where it has one."""
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "min_window_s"}
        return own | {
            "window_steps": None if self.min_window_s else self.window_steps,
            "policy_options": dict(self.policy_options),
        }

    def _check_explores(self) -> None:
        for each in self.explores:
            check_choice("explores", each, get_args(Explored))
        if self.explores and not self.family:
            raise ValueError(
                f"explores={list(self.explores)} is between the runs of a family: add family='auto', or a name"
            )
        if self.objective != "time" and not self.explores:
            raise ValueError(
                f"objective={self.objective!r} is what runs that try something out are compared by: add "
                'explores=["learning_rate"], for example, and a family'
            )
        if "exchange" in self.explores and self.exchange == "exact":
            raise ValueError("explores='exchange' has nothing to explore: use it with exchange='lossy' or 'local'")

    def _check_exchange(self) -> None:
        for name in self.named_codecs:
            if self.exchange == "exact" and not exchange_codec(name).is_lossless:
                raise ValueError(
                    f"policy option codec={name}: it rounds gradients, which this job does not permit: "
                    'attach(exchange="lossy")'
                )
        first = self.initial_allocation.exchange
        self._check_asked(first)
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

    def _check_asked(self, first: Exchange) -> None:
        """Check what the options ask for, and that it is not something else than what lasts."""
        asked = initial_exchange(self.policy, self.policy_options)
        if self.fixed_exchange is not None and asked not in (EXACT, first):
            raise ValueError(
                f"policy {self.policy!r} with its options asks for gradients {asked.label}, but they travel "
                f"{first.label} in the whole run: leave these options out, or use another policy"
            )
        if (
            self.policy in EXCHANGE_POLICIES
            and asked.every == 1
            and self.policy_options.keys() & {"outer_rate", "outer_momentum"}
        ):
            raise ValueError("options outer_rate and outer_momentum are of rounds of local steps: add every=2 or more")

    def _check_traces(self) -> None:
        """Check that compute times are measured separately, which agents need."""
        if self.policy != STIGMERGY:
            return
        if not self.supports_tracking and len(self.local_batch_sizes) > 1:
            raise ValueError(
                f"policy {STIGMERGY!r} needs the compute time of each rank, which only our own communication hook "
                'measures: use weighting="hook" on a DistributedDataParallel model, without base_hook, or '
                "another policy"
            )
        if self.policy_options.get("learned") == 1 and self.global_batch == "fixed":
            raise ValueError(
                f"option learned=1 of policy {STIGMERGY!r} only changes the global batch, which is fixed: add "
                'global_batch="adaptive", or leave the option out'
            )

    def _check_lag(self) -> None:
        """An action of window t is known one window later and broadcast `margin_steps` before it starts."""
        shortest = 1 + -(-self.margin_steps // self.window_steps)
        if shortest > self.max_lag_windows:
            spare = 2 if self.exchange == "exact" else 3
            raise ValueError(
                f"window_steps={self.window_steps} is too short for a loader that draws {self.margin_steps - spare} "
                f"batches ahead: an action would be {shortest} windows old, max_lag_windows={self.max_lag_windows}; "
                "use longer windows or less num_workers * prefetch_factor"
            )


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

    Args:
        given: the arguments.
        models: without wrappers.
        optimizers: likewise.
        averaging: who averages gradients.
        world_size: number of ranks.
        margin_steps: steps between a broadcast and its effect that prefetching demands.
        policy: overrules the argument where it is not empty.
        gradient_servers: addresses from the environment.

    Raises:
        TypeError: for what is of another type than the option.
        ValueError: for what cannot work.
    """
    exchange, servers = served_exchange(given["exchange"], gradient_servers)
    base_hook, in_batches = given["base_hook"], given["count_tokens"] is not None
    check_hook_options(averaging, len(models), base_hook)
    check_exchange_options(averaging, exchange, base_hook)
    check_local_options(exchange, optimizers, counts_in_batches=in_batches)
    sizes, global_batch = sizes_of(given["local_batch_size"], world_size), given["global_batch"]
    num_batches = whole_number("gradient_accumulation_steps", given["gradient_accumulation_steps"])
    lower, upper = bounds_of(
        *(sizes, global_batch, (given["min_local_batch_size"], given["max_local_batch_size"])),
        fewest_samples(models, num_batches),
    )
    margin_steps += exchange in ("lossy", "local")
    window_steps, base = given["window_steps"], given["base_global_batch_size"]
    is_ours = averaging == "hook" and base_hook is None
    derived = {
        "local_batch_sizes": sizes,
        "base_global_batch_size": sum(sizes) if base is None else base,
        "window_steps": WINDOW_STEPS * -(-margin_steps // WINDOW_STEPS) if window_steps is None else window_steps,
        "min_window_s": MIN_WINDOW_S if window_steps is None else 0.0,
        "min_local_batch_size": lower,
        "max_local_batch_size": upper,
        "margin_steps": margin_steps,
        "policy": policy or given["policy"] or (SPLIT_POLICY if global_batch == "fixed" else DEFAULT_POLICY),
        "policy_options": policy_options_of(given["policy_options"]),
        "optimizer_family": given["optimizer_family"] or family_of(optimizers[0]),
        "supports_tracking": is_ours,
        "supports_exchange": is_ours,
        "exchange": "exact" if isinstance(exchange, Exchange) else exchange,
        "fixed_exchange": exchange if isinstance(exchange, Exchange) else None,
        "gradient_servers": servers,
        "table_share": table_share(models),
        "family": job_family(given["family"], models, optimizers, given["dataset"], given["learning_rate_rule"]),
        "explores": names_of("explores", given["explores"], "learning_rate"),
    }
    return JobOptions(**{each.name: given[each.name] for each in fields(JobOptions) if each.name in given} | derived)


def bounds_of(
    sizes: tuple[int, ...], global_batch: GlobalBatch, given: tuple[int | None, int | None], least: int
) -> tuple[int, int]:
    """The bounds of decisions as they were given, or what suits the initial sizes.

    No size is too small for speed: below what a rank's own times show to be pointless no policy that fits them goes.
    So the lower bound is `least`, which the model needs. With a fixed global batch the memory that the script was
    written for is near: a rank gets at most twice its samples.
    """
    low, largest = min(*sizes, least), max(sizes)
    high = max(largest, 1024) if global_batch == "adaptive" else 2 * largest
    return low if given[0] is None else given[0], high if given[1] is None else given[1]


def fewest_samples(models: Iterable[torch.nn.Module], num_batches: int) -> int:
    """The fewest samples that a rank's `num_batches` of a step can have: two in each where BatchNorm is, else one."""
    modules = (module for model in models for module in model.modules())
    batch_norm = torch.nn.modules.batchnorm._BatchNorm  # noqa: SLF001 - what all kinds of it share
    has_batch_norm = any(isinstance(module, batch_norm) for module in modules)
    return num_batches * (2 if has_batch_norm else 1)


def family_of(optimizer: torch.optim.Optimizer) -> OptimizerFamily:
    """The reward's optimizer family, from the names of the optimizer's classes."""
    names = " ".join(cls.__name__.lower() for cls in type(optimizer).__mro__)
    return "adam" if any(name in names for name in ADAPTIVE) else "sgd"


def check_local_options(
    exchange: ExchangePermission | Exchange, optimizers: Iterable[torch.optim.Optimizer], *, counts_in_batches: bool
) -> None:
    """Raise ValueError where ranks cannot make steps of their own, saying how to fix it."""
    if not (exchange == "local" or (isinstance(exchange, Exchange) and exchange.every > 1)):
        return
    if counts_in_batches:
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


def warn_of_two_momenta(exchange: Exchange, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Warn where outer steps add momentum to that of the optimizer."""
    if exchange.outer_momentum and any(group.get("momentum") for each in optimizers for group in each.param_groups):
        _log.warning(
            "outer_momentum=%g adds to the momentum of the optimizer, and both together train much worse than one of "
            "them: use outer_rate=1 and outer_momentum=0, or an optimizer without momentum such as AdamW",
            exchange.outer_momentum,
        )


def check_exchange_options(
    averaging: Averaging, exchange: ExchangePermission | Exchange, base_hook: BaseHook | None
) -> None:
    """Raise ValueError where nothing but an exact exchange can be carried out, saying how to fix it."""
    if exchange in ("exact", EXACT) or averaging == "none":
        return
    what = f"exchange={exchange.label if isinstance(exchange, Exchange) else exchange!r}"
    if averaging == "loss":
        raise ValueError(
            f'{what} needs weighting="hook" on a DistributedDataParallel model: FSDP and frameworks that '
            "average gradients exchange them on their own"
        )
    if base_hook is not None:
        raise ValueError(f"{what} and a base_hook exclude each other: what the hook sends is its own")


def check_hook_options(
    averaging: Averaging,
    num_models: int,
    base_hook: BaseHook | None,
) -> None:
    """Raise ValueError for options of the communication hook that cannot work, saying how to fix it."""
    if averaging != "hook":
        if base_hook is not None:
            raise ValueError('base_hook is for weighting="hook": register it on the model yourself')
    elif base_hook is not None and num_models > 1:
        raise ValueError("base_hook and its state belong to one model: attach one model with it, without a list")


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


SERVED_CODECS = ("none", "rows")
"""Codecs whose sums owners without a gradient of their own can make."""
VARIABLE = "DYNAMIX_TRAINER_GRADIENT_SERVERS"


def server_addresses(text: str) -> tuple[str, ...]:
    """The servers that the environment names.

    Raises:
        ValueError: for what is no list of addresses, or names one twice.
    """
    addresses = tuple(part.strip() for part in text.split(",") if part.strip())
    for address in addresses:
        split_address(address)
    if len(set(addresses)) < len(addresses):
        raise ValueError(f"{VARIABLE}={text}: each server once")
    return addresses


def served_exchange(
    exchange: ExchangePermission | Exchange, named: str
) -> tuple[ExchangePermission | Exchange, tuple[str, ...]]:
    """The requested exchange, over the servers of this job, and their addresses.

    Raises:
        ValueError: when it asks for something that servers cannot do, or for servers without any.
    """
    servers = server_addresses(named)
    return _checked(exchange, servers), servers


def _checked(exchange: ExchangePermission | Exchange, servers: tuple[str, ...]) -> ExchangePermission | Exchange:
    asks = isinstance(exchange, Exchange) and exchange.route == SERVERS
    if not servers:
        if asks:
            raise ValueError(
                f"the route {SERVERS!r} needs gradient servers: start `dynamix serve-gradients` and name the "
                f"addresses in {VARIABLE}=HOST:PORT,..."
            )
        return exchange
    if exchange == "exact":
        return Exchange(route=SERVERS)
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
    return exchange


AUTO = "auto"
MOST_LETTERS = 48
"""Most of the script's name in the family's."""
_NUMBERS = (bool, int, float, tuple)


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
    parts = (*map(_of_model, models), *map(_of_optimizer, optimizers), _of_data(dataset), *further)
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:8]
    script = re.sub("[^a-z0-9]+", "-", Path(sys.argv[0]).stem.lower()).strip("-")[:MOST_LETTERS]
    return f"{script or 'training'}-{digest}"


def _of_model(model: torch.nn.Module) -> tuple[object, ...]:
    inner = model.module if isinstance(getattr(model, "module", None), torch.nn.Module) else model
    assert isinstance(inner, torch.nn.Module), "a model is one"
    shapes = [tuple(parameter.shape) for parameter in inner.parameters() if parameter.requires_grad]
    return (type(inner).__qualname__, *shapes)


def _of_optimizer(optimizer: torch.optim.Optimizer) -> tuple[object, ...]:
    settings: dict[str, Any] = optimizer.defaults
    known = [(name, value) for name, value in sorted(settings.items()) if isinstance(value, _NUMBERS)]
    return (type(optimizer).__qualname__, *known)


def _of_data(dataset: object) -> tuple[object, ...]:
    length = len(dataset) if hasattr(dataset, "__len__") else None
    return (type(dataset).__qualname__, length)
