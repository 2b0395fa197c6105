"""Timing: how long the buckets of an exchange take, over links and through two lanes. Pure.

A bucket goes through two lanes, as in the trainer: what a rank codes before its first collective and that collective in
the first one, all that follows in the second. Each lane takes the buckets in their order, so that the sums of one come
back while the next is on its way. But a link sends, and receives, one byte at a time: the buckets from any one on take
no less than all their bytes over the busiest direction of the slowest link.

    lane 1: end1_k = max(end1_(k-1), ready_k) + coding_k / 2 + first collective
    lane 2: end2_k = max(end2_(k-1), end1_k) + coding_k / 2 + further collectives
    link:   end_k  = max(end_(k-1), ready_k) + max_i max(sent_i, received_i) congestion_i / bandwidth_i
    ring of n bytes:  2 (N - 1) * max(mean_i (l_i + s_i), max_i s_i),  s_i = congestion_i * n / (N bandwidth_i)
    all to all:       max_i (l_i + congestion_i * max(sent_i, received_i) / bandwidth_i)
    coding: max slowdown * (seconds per byte * gradient bytes + seconds per message * messages)

Gradients as they are over owners travel in chunks of each bucket, which are ready together (`owners.chunks_of`). A
bucket that goes through one all-reduce and no more is sent as it is, and not coded: by `none`, and where a codec
without loss by-passes it. Coding costs what it costs an idle core: that it takes time from the model's own computing
where cores are few is not in the formulas.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from .traffic import BucketTraffic, CollectiveTraffic, StepTraffic

Array64 = npt.NDArray[np.float64]


class LinkSpeeds(NamedTuple):
    """What the links of all ranks do now; float64, one per rank."""

    bandwidth: Array64
    """Bytes per second, each way."""
    latency_s: Array64


class CodingCost(Protocol):
    """What codecs cost a rank that nothing slows, in seconds."""

    @property
    def message_s(self) -> float:
        """Seconds for each message to and from another rank."""

    def s_per_byte(self, codec: str) -> float:
        """Seconds for each byte of the gradient."""


class BucketTimes(NamedTuple):
    """What one bucket costs, in seconds."""

    first_s: float
    second_s: float
    link_s: float


def bucket_times(traffic: StepTraffic, links: LinkSpeeds, coding: CodingCost, slowdown: float) -> list[BucketTimes]:
    """What each bucket of a step costs."""
    return [_of_bucket(bucket, links, slowdown * _coding_s(bucket, coding)) for bucket in traffic.buckets]


def finish_s(buckets: Sequence[BucketTimes], ready_s: Sequence[float]) -> float:
    """When the last bucket is back, if they are ready at these times; 0 without any."""
    first = second = link = 0.0
    for times, ready in zip(buckets, ready_s, strict=True):
        first = max(first, ready) + times.first_s
        second = max(second, first) + times.second_s
        link = max(link, ready) + times.link_s
    return max(second, link)


def ready_times_s(traffic: StepTraffic, computed_s: float, overlap: float) -> list[float]:
    """When each bucket is ready: the first when the share `overlap` of computing is left, the last when it ends."""
    num_buckets = sum(not bucket.is_continued for bucket in traffic.buckets)
    last = max(1, num_buckets - 1)
    whole = [computed_s * (1 - overlap * (last - number) / last) for number in range(num_buckets - 1)] + [computed_s]
    numbers = np.cumsum([not bucket.is_continued for bucket in traffic.buckets]) - 1
    return [whole[number] for number in numbers]


def _of_bucket(bucket: BucketTraffic, links: LinkSpeeds, coding_s: float) -> BucketTimes:
    if not bucket.collectives:
        return BucketTimes(0.0, 0.0, 0.0)
    first, *further = (_collective_s(each, links) for each in bucket.collectives)
    return BucketTimes(coding_s / 2 + first, coding_s / 2 + sum(further), _link_s(bucket.collectives, links))


def _coding_s(bucket: BucketTraffic, coding: CodingCost) -> float:
    if len(bucket.collectives) == 1 and bucket.collectives[0].is_ring:
        return 0.0
    num_messages = sum(each.num_messages for each in bucket.collectives)
    return coding.s_per_byte(bucket.coded.codec) * bucket.coded.gradient_bytes + coding.message_s * num_messages


def _collective_s(collective: CollectiveTraffic, links: LinkSpeeds) -> float:
    num_ranks = len(links.bandwidth)
    if collective.is_ring:
        num_rounds = 2 * (num_ranks - 1)
        sending_s = collective.sent / num_rounds / links.bandwidth
        return num_rounds * max(float((links.latency_s + sending_s).mean()), float(sending_s.max()))
    busiest = np.maximum(collective.sent, collective.received)
    return float((links.latency_s + busiest / links.bandwidth).max())


def _link_s(collectives: Sequence[CollectiveTraffic], links: LinkSpeeds) -> float:
    sent = np.sum([each.sent for each in collectives], axis=0)
    received = np.sum([each.received for each in collectives], axis=0)
    return float((np.maximum(sent, received) / links.bandwidth).max())
