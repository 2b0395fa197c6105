"""What a script does wrong is refused, with what to do instead."""

import pytest
import torch
from tests.support.ranks import RankError, run_ranks
from tests.support.training import Numbered, begin_job, distribute, kept_messages, make_model, train_step
from torch import nn

from dynamix import trainer as dynamix
from dynamix.trainer.gradient.hook import MOST_ALONE
from dynamix.trainer.session import VERSION


def _attach_differently(rank: int) -> None:
    begin_job(Numbered(100), distribute(make_model()), local_batch_size=8 + rank)


def test_options_that_differ_between_ranks_end_all_of_them() -> None:
    with pytest.raises(RankError) as error:
        run_ranks(_attach_differently, 2)
    assert (
        str(error.value).count("rank 1 attached with other options than rank 0 (local_batch_sizes=(9, 9) and not") == 2
    )


def _train_on_other_batches(_rank: int) -> list[str]:
    messages, data = kept_messages(), Numbered(64)
    model = distribute(make_model())
    session, _, _ = begin_job(data, model)
    for _ in range(2 * MOST_ALONE):
        model(data.inputs[:4]).sum().backward()
    session.close()
    return messages


def test_a_job_that_ignores_the_sessions_loader_is_warned_once() -> None:
    (warning,), of_rank_1 = run_ranks(_train_on_other_batches, 2)
    assert f"{MOST_ALONE} forward passes of training without a batch of the session" in warning
    assert of_rank_1 == []


def _misuse(_rank: int) -> None:
    data = Numbered(64)
    model = distribute(make_model())
    session, _, optimizer = begin_job(data, model, window_steps=1)
    with pytest.raises(RuntimeError, match="another session covers the model: end that one first"):
        begin_job(data, model)
    with pytest.raises(RuntimeError, match="without a batch"):
        session.step()
    with pytest.raises(ValueError, match=r"session.evaluated\(accuracy\)=83"):
        session.evaluated(83)
    with pytest.raises(ValueError, match=r"session.epochs\(num_epochs\)=2.5"):
        next(session.epochs(2.5))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no current batch"):
        _ = session.num_samples
    batches = iter(session.loader)
    next(batches)
    assert session.scale_loss(loss := torch.ones(())) is loss  # the hook weighs: nothing to scale
    with pytest.raises(RuntimeError, match=r"step 0 is not finished.*save after optimizer.step\(\)"):
        session.state_dict()
    with pytest.raises(RuntimeError, match="after the first step"):
        session.load_state_dict({})
    with pytest.raises(ValueError, match=r"session.step\(loss\): a tensor of shape \(8,\): pass one number"):
        session.step(torch.ones(8))
    session.close()
    with pytest.raises(RuntimeError, match="this session has ended"):
        next(iter(session.loader))
    with pytest.raises(RuntimeError, match="this session has ended"):
        session.step()

    plain = make_model()
    for name, value, text in (
        ("weighting", "hook", "needs a DistributedDataParallel model"),
        ("base_hook", print, "base_hook is for"),
        ("samplers", 3, r"attach does not know samplers: did you mean sampler\?"),
        ("qqq", 3, "attach does not know qqq; for the loader it takes"),
        ("look_ahead", "1", "look_ahead='1'"),
        ("connect", "nats://127.0.0.1:1", "connect='nats://127.0.0.1:1' is of type str: leave connect out and set"),
    ):
        with pytest.raises((ValueError, TypeError), match=text):
            begin_job(data, plain, **{name: value})
    with pytest.raises(ValueError, match="name='My Job!': a job's name has 1 to 54 of the characters"):
        begin_job(data, distribute(make_model()), name="My Job!")
    with pytest.raises(TypeError, match=r"Linear is not a torch.optim.Optimizer and wraps none: pass model, opt"):
        dynamix.attach(optimizer, nn.Linear(2, 2), data, local_batch_size=8)  # type: ignore[arg-type]
    session, _, optimizer = begin_job(data, plain, weighting="loss", seed=5)
    state = session.state_dict()
    state["data"]["seed"] = 0
    with pytest.raises(ValueError, match=r"in another order \(seed 0, now 5\): attach alike"):
        session.load_state_dict(state)
    for batch in session.loader:
        with pytest.raises(RuntimeError, match="is not weighted"):
            train_step(session, plain, optimizer, batch)
        break
    session.close()

    table = nn.Embedding(50, 4, sparse=True)
    model = distribute(nn.Sequential(table))
    with pytest.raises(ValueError, match=r"module\.0 is an Embedding with sparse=True, whose gradients"):
        begin_job(data, model)
    begin_job(data, model, weighting="loss")[0].close()  # no hook weighs them
    table.sparse = False
    begin_job(data, model)[0].close()


def test_misuse_is_told_what_to_do() -> None:
    run_ranks(_misuse, 1)


def test_attaching_without_a_process_group_is_refused_where_a_launcher_announced_several_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = make_model()
    with pytest.raises(RuntimeError, match="is not initialised: call"):
        begin_job(Numbered(10), model)


def _first_batch(**options: object) -> None:
    session, _, _ = begin_job(Numbered(64), make_model(), connect=False, **options)
    with session:
        next(iter(session.loader))


@pytest.mark.parametrize(
    ("argument", "value"),
    [("weighting", "x"), ("base_hook", 3), ("gradient_accumulation_steps", 0), ("count_tokens", lambda _: 0.9)],
)
def test_a_wrong_value_of_an_argument_is_named(argument: str, value: object) -> None:
    with pytest.raises((TypeError, ValueError), match=argument):
        _first_batch(**{argument: value})


@pytest.mark.parametrize("saved", [3, {}, {"version": VERSION}])
def test_what_is_no_state_of_a_session_is_refused(saved: object) -> None:
    session, _, _ = begin_job(Numbered(64), make_model(), connect=False)
    with session, pytest.raises(ValueError, match="session state"):
        session.load_state_dict(saved)  # type: ignore[arg-type]


@pytest.mark.parametrize("own_steps", [0, 1])
def test_a_script_that_also_advances_a_scheduler_of_the_session_is_warned_once(
    own_steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    session, model, optimizer = begin_job(Numbered(64), make_model(), connect=False)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=100)
    session.schedule(scheduler)
    session.schedule(torch.optim.lr_scheduler.ChainedScheduler([torch.optim.lr_scheduler.ConstantLR(optimizer)]))
    scheduler.load_state_dict(scheduler.state_dict() | {"last_epoch": 3})  # as one resumes: no reason to warn
    with session:
        for batch in session.loader:
            train_step(session, model, optimizer, batch)
            for _ in range(own_steps):
                scheduler.step()
    warnings = [text for text in caplog.messages if "beside session.schedule" in text]
    assert len(warnings) == own_steps
