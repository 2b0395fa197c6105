"""What is measured: cases of ranks, links, densities and masks, each with all arms; and the arguments that say so."""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeVar, get_args

import msgspec
from bench.harness.command import benchmark_parser
from bench.hosts import HostsError, Link

from dynamix.schemas.messages.allocation import SERVERS
from dynamix.trainer.exchange.registry import CODECS
from dynamix.trainer.job.served_exchange import SERVED_CODECS

Mask = Literal["steady", "identical", "independent"]
"""Where the rows are that are not zero: in the same places on all ranks and in all exchanges, as published measurements
have them (arXiv 2402.07529); on all ranks, but elsewhere in every exchange; or elsewhere on every rank, too."""
Value = TypeVar("Value", int, float)

ALL_REDUCE, TORCH_SPARSE = "all-reduce", "torch-sparse"
BASELINES = (ALL_REDUCE, TORCH_SPARSE)
UNLIMITED = "none"
MAX_RANKS = 64
SERVERS_OPTION = ("--servers", "0", "numbers of gradient servers, each on a host of its own, for arms CODEC@servers")


class LinkedCase(msgspec.Struct, frozen=True, kw_only=True):
    """One network."""

    num_ranks: int
    link: str
    """Rate of all links as `tc` writes it, or `none`."""
    num_servers: int = 0
    """Gradient servers, each on a host of its own behind such a link."""

    @property
    def network(self) -> str:
        """In words."""
        plural = "s" if self.num_servers > 1 else ""
        served = f", {self.num_servers} gradient server{plural}" if self.num_servers else ""
        return f"{self.num_ranks} ranks{served}, {self.link}"


class Case(LinkedCase, frozen=True, kw_only=True):
    """One gradient on one network."""

    density: float
    """Share of a rank's rows that are not zero."""
    mask: Mask
    width: int
    """Numbers in a row; 1: single elements are zero or not."""


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank does with a case."""

    num_elements: int
    num_buckets: int
    """Parts of the gradient that codecs sum one behind the other, as DDP's buckets."""
    num_rounds: int
    num_warm_up: int
    arms: tuple[str, ...]
    """Baselines, and codecs as `NAME`, over owners with equal shares `NAME@shares`, or with servers `NAME@servers`."""
    seed: int


class ExchangePlan(NamedTuple):
    """Everything that is measured."""

    rank: RankPlan
    ranks: tuple[int, ...]
    links: tuple[str, ...]
    densities: tuple[float, ...]
    masks: tuple[Mask, ...]
    widths: tuple[int, ...]
    servers: tuple[int, ...]

    def cases(self) -> Iterator[Case]:
        """All, one link after the other. One rank's mask is any rank's where nothing is zero."""
        for num_ranks, num_servers, link, width, density, mask in itertools.product(
            self.ranks, self.servers, self.links, self.widths, self.densities, self.masks
        ):
            if density < 1 or mask == self.masks[0]:
                yield Case(
                    num_ranks=num_ranks,
                    num_servers=num_servers,
                    link=link,
                    density=density,
                    mask=mask,
                    width=width,
                )


def link_named(text: str) -> Link | None:
    """The link of a rate; `None` for `none`.

    Raises:
        HostsError: for what is not a rate.
    """
    return None if text == UNLIMITED else Link.parse(text)


def exchange_parser(description: str | None) -> argparse.ArgumentParser:
    """Parser with the cases; lists are written with commas."""
    return benchmark_parser(
        *("exchange", description),
        ("--ranks", "4", "numbers of ranks, each rank on a host of its own"),
        ("--links", "100mbit", f"rates of all links, as tc writes them; {UNLIMITED}: as fast as memory"),
        ("--densities", "0.05", "shares of a rank's rows that are not zero"),
        ("--masks", "steady,identical,independent", "where rows are: always there, the same on all ranks, or anywhere"),
        ("--widths", "1", "numbers in a row; 1: single elements are zero or not"),
        (
            "--arms",
            ",".join((*BASELINES, *CODECS)),
            "baselines and codecs; CODEC@shares: over owners with equal shares, CODEC@servers: over ranks and servers",
        ),
        SERVERS_OPTION,
        ("--log2-elements", 22, "logarithm of the numbers in the gradient"),
        ("--buckets", 4, "of the gradient, which codecs sum one behind the other"),
        ("--rounds", 10, "exchanges of an arm that are measured"),
        ("--warm-up", 2, "exchanges of an arm before them"),
        ("--seed", 1, "of the gradients"),
        has_figure=True,
    )


def plan_of(options: argparse.Namespace) -> ExchangePlan:
    """The plan.

    Raises:
        ValueError: for what cannot be run.
    """
    plan = ExchangePlan(
        rank=RankPlan(
            num_elements=1 << options.log2_elements,
            num_buckets=at_least(1, "--buckets", options.buckets),
            num_rounds=at_least(1, "--rounds", options.rounds),
            num_warm_up=at_least(1, "--warm-up", options.warm_up),
            arms=tuple(options.arms.split(",")),
            seed=options.seed,
        ),
        ranks=numbers("--ranks", options.ranks, int, 2, MAX_RANKS),
        links=tuple(options.links.split(",")),
        densities=numbers("--densities", options.densities, float, 1 / (1 << options.log2_elements), 1.0),
        masks=tuple(_mask(text) for text in options.masks.split(",")),
        widths=numbers("--widths", options.widths, int, 1, 1 << options.log2_elements),
        servers=numbers("--servers", options.servers, int, 0, MAX_RANKS),
    )
    check_arms(plan.rank.arms, plan.servers)
    for width in plan.widths:
        if plan.rank.num_elements % width:
            raise ValueError(f"--widths {width}: {plan.rank.num_elements} numbers are not whole rows of it")
        if plan.rank.num_elements // width < plan.rank.num_buckets:
            raise ValueError(f"--buckets {plan.rank.num_buckets}: more than rows of {width} numbers")
    check_links(plan.links)
    return plan


def check_links(links: Sequence[str]) -> None:
    """Raise ValueError for what is not a rate."""
    for link in links:
        try:
            link_named(link)
        except HostsError as error:
            raise ValueError(f"--links: {error}") from error


def check_arms(arms: Sequence[str], servers: Sequence[int]) -> None:
    """Raise ValueError for unknown arms, without the one that the others are compared with, and without servers."""
    if arms[:1] != (ALL_REDUCE,):
        raise ValueError(f"--arms {','.join(arms)}: begin with {ALL_REDUCE}, which the others are compared with")
    known = {
        *BASELINES,
        *CODECS,
        *(f"{name}@shares" for name in CODECS),
        *(f"{name}@{SERVERS}" for name in SERVED_CODECS),
    }
    for arm in arms:
        if arm not in known:
            raise ValueError(f"--arms: {arm!r} is none of {', '.join(sorted(known))}")
    if len(set(arms)) < len(arms):
        raise ValueError(f"--arms {','.join(arms)}: each once")
    served = [arm for arm in arms if arm.endswith(f"@{SERVERS}")]
    if served and not all(servers):
        raise ValueError(f"--arms {served[0]}: say how many with --servers, at least 1")
    if any(servers) and not served:
        raise ValueError(f"--servers {','.join(map(str, servers))}: no arm uses them, add CODEC@{SERVERS} to --arms")


def _mask(text: str) -> Mask:
    for mask in get_args(Mask):
        if text == mask:
            found: Mask = mask
            return found
    raise ValueError(f"--masks: {text!r} is none of {', '.join(get_args(Mask))}")


def numbers(option: str, text: str, kind: type[Value], least: float, most: float) -> tuple[Value, ...]:
    """A list as it is written, or ValueError."""
    try:
        values = tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"{option} {text}: write numbers with commas between them") from error
    if not all(least <= value <= most for value in values):
        raise ValueError(f"{option} {text}: from {least:g} to {most:g}")
    return values


def at_least(least: int, option: str, value: int) -> int:
    """The value, or ValueError."""
    if value < least:
        raise ValueError(f"{option} {value}: at least {least}")
    return value
