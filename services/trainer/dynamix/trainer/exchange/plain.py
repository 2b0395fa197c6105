"""Plain exchange: gradients as they are, by the all-reduce or to owners."""

from .codec import BucketView, Member
from .collectives import Leg
from .owners import sum_over_ranks


class PlainExchange:
    """The codec `none`."""

    name = "none"
    is_lossless = True

    def reduce(self, bucket: BucketView, member: Member) -> Leg:
        """Sum as `ExchangeCodec.reduce`."""
        return sum_over_ranks(bucket.flat, member)
