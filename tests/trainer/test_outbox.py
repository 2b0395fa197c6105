from tests.support import examples

from dynamix.schemas.messages import Applied, Message
from dynamix.trainer.wire.client import Outbox


def _all(outbox: Outbox) -> list[Message]:
    found = []
    while (message := outbox.oldest()) is not None:
        found.append(message)
        outbox.remove(message)
    return found


def test_a_full_outbox_gives_up_its_oldest_report_and_nothing_else() -> None:
    job = examples.job()
    applied = Applied(
        job=examples.JOB, generation=0, decided_window=0, effective_window=2, effective_step=40, local_batch_sizes=(1,)
    )
    reports = [examples.report(window=window) for window in range(4)]
    outbox = Outbox(4)
    for message in (job, reports[0], applied, reports[1], reports[2], reports[3]):
        outbox.put(message)
    assert outbox.num_dropped == 2
    assert _all(outbox) == [job, applied, reports[2], reports[3]]
