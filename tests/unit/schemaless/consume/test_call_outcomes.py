"""Each outcome of a call has one meaning: in a first call, a repetition, in lanes, after a death, and in the kit."""

import asyncio
import concurrent.futures
import contextlib
import functools

import pytest

from schemaless import Park, Retry, trigger
from schemaless.consume.trigger_program import load_program
from schemaless.errors import Misconfigured
from schemaless.testing import TriggerKit
from tests.unit.schemaless.consume.parking_world import Process, Server

RAISED = [StopIteration, StopAsyncIteration, GeneratorExit, SystemExit, KeyboardInterrupt, asyncio.CancelledError]


class Own(BaseException):
    """One that a library made."""


def generator():
    yield


async def async_generator():
    yield


async def coroutine_function():
    pass


def in_a_pool(work):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(work)


@contextlib.contextmanager
def manager():
    yield


LAZY = {
    "generator": generator,
    "async_generator": async_generator,
    "map": lambda: map(print, [1]),
    "partial": lambda: functools.partial(print, 1),
    "function": lambda: generator,
    "a list with coroutine": lambda: [coroutine_function()],
    "a list with Future": lambda: [in_a_pool(generator)],
    "_GeneratorContextManager": manager,
}

WAYS = ["alone", "beside an async function", "in lanes", "after a death"]


async def parked_error(do, is_async, way):
    """Lets a program call a function twice for one cell. Returns the text with which the cell was parked."""
    other_row = []

    def call(cell):
        return do() if cell.body.get("bad") else other_row.append(cell.ref_key)

    async def call_later(cell):
        return call(cell)

    @trigger(column="OTHER")
    async def beside(cell):
        pass

    function = trigger(column="BASE", name="f")(call_later if is_async else call)
    server = Server()
    bad, good = server.write(1, body={"bad": True}), server.write(2)
    options = {"attempts_max": 2, "kills_max": 9} | ({"parallel": 4} if way == "in lanes" else {})
    functions = [function, beside] if way == "beside an async function" else [function]
    process = Process(server, 1, functions, **options)
    if way == "after a death":
        server.checkpoints[0].worker, server.checkpoints[0].begun = 7, True
        server.present.add(7)
        process = Process(server, 2, functions, **options)
    await asyncio.wait_for(process.pass_by(10.0), 30)
    assert server.causes() == {bad: "error"}
    assert other_row == [good]
    return server.parked[bad].error


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", [*RAISED, Own])
async def test_whatever_a_function_raises_is_a_failed_attempt(kind, is_async, way):
    """It is repeated, and the cell is parked with its name. Neither the shard nor the worker ends."""

    def fail():
        raise kind

    assert kind.__name__ in await parked_error(fail, is_async, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("what", LAZY)
async def test_work_that_is_returned_and_not_done_is_a_failed_attempt(what, is_async, way):
    """Nobody would do it, and the cell would count as called."""
    error = await parked_error(LAZY[what], is_async, way)
    assert f"the function returned {what}, which is work that nobody does" in error


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", [ZeroDivisionError, *RAISED[1:]])
async def test_what_can_be_waited_for_is_waited_for(kind, is_async, way):
    """A coroutine that a plain function returns, and one that returns another one. Its error is that of the call."""

    async def later():
        raise kind

    async def hand_on():
        return later()

    assert kind.__name__ in await parked_error(hand_on, is_async, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", [ZeroDivisionError, *RAISED])
async def test_the_future_of_an_executor_is_waited_for(kind, is_async, way):
    """Its work is part of the call."""

    def fail():
        raise kind

    assert kind.__name__ in await parked_error(lambda: in_a_pool(fail), is_async, way)


async def cancel_own_task():
    asyncio.current_task().cancel()


async def cancel_own_task_and_wait():
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


async def cancel_own_task_and_raise():
    """As old libraries of timeouts do."""
    try:
        await cancel_own_task_and_wait()
    except asyncio.CancelledError as cancelled:
        raise TimeoutError from cancelled


CANCELS = {
    cancel_own_task: "its task, was cancelled",
    cancel_own_task_and_wait: "its task, was cancelled",
    cancel_own_task_and_raise: "TimeoutError",
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("cancel", CANCELS)
async def test_a_function_that_cancels_its_task_is_a_failed_attempt(cancel, is_async, way):
    """It would end a call of ours, and cells that were read would be passed over (I10)."""
    assert CANCELS[cancel] in await parked_error(cancel, is_async, way)


class OddRetry(Retry):
    def __init__(self):
        self.delay_s = "soon"


@pytest.mark.parametrize("way", WAYS)
async def test_a_verdict_with_something_odd_in_it_is_a_failed_attempt(way):
    """A class that derives from one may forget what is in it."""

    def fail():
        raise OddRetry

    assert "Retry: delay_s must be seconds" in await parked_error(fail, False, way)


async def test_a_reason_may_be_anything():
    """It is stored as a text."""

    class OddPark(Park):
        def __init__(self):
            self.reason = 7

    def park(cell):
        raise OddPark

    server = Server()
    bad = server.write(1)
    await asyncio.wait_for(Process(server, 1, [trigger(column="BASE")(park)]).pass_by(5.0), 30)
    assert server.parked[bad].error == "7"


async def test_what_a_plain_function_returns_has_the_time_of_an_async_one():
    """Otherwise it would hold its row for ever."""

    async def never():
        await asyncio.Event().wait()

    function = trigger(column="BASE", name="f")(lambda cell: never())
    server = Server()
    bad = server.write(1)
    await asyncio.wait_for(Process(server, 1, [function], attempts_max=1, attempt_timeout_s=0.05).pass_by(5.0), 30)
    assert "TimeoutError" in server.parked[bad].error


class AsyncCallable:
    __name__ = "object"

    async def __call__(self, cell):
        yield


@pytest.mark.parametrize(
    "function",
    [
        lambda cell: (yield),
        functools.partial(lambda cell, more: (yield), more=1),
        AsyncCallable(),
    ],
)
def test_a_generator_is_refused_when_it_is_marked(function):
    """Calling it makes a generator, whose body nobody runs."""
    with pytest.raises(Misconfigured, match="is a generator: a call of it would run nothing"):
        trigger(column="BASE", name="f")(function)


@pytest.mark.parametrize("function", [int, print, None])
def test_what_isnt_a_function_is_refused_with_a_sentence(function):
    """A class makes an object, and others can't carry a mark."""
    with pytest.raises(Misconfigured, match="can't be a trigger function: mark a function that takes the cell"):
        trigger(column="BASE", name="f")(function)


def test_a_decorator_above_the_mark_is_refused():
    """It isn't part of the function that is called, so what it does would silently not be done."""

    def other(function):
        @functools.wraps(function)
        def wrapped(cell):
            return function(cell)

        return wrapped

    @other
    @trigger(column="BASE")
    def bill(cell):
        pass

    with pytest.raises(Misconfigured, match="another decorator stands above @trigger of bill: put @trigger on top"):
        TriggerKit([bill])


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", [*RAISED, Own])
def test_the_kit_shows_what_a_function_raised(kind, is_async):
    """As a call that ended with this error."""

    def fail(cell):
        raise kind

    async def fail_later(cell):
        fail(cell)

    with TriggerKit([trigger(column="BASE", name="f")(fail_later if is_async else fail)], attempts_max=1) as kit:
        kit.put("6ba7b810-9dad-11d1-80b4-00c04fd430c8", "BASE", {})
        kit.deliver()
        (parked,) = kit.parked()
        assert kind.__name__ in parked.error
        assert "raised" in str(kit.calls[0].error) or isinstance(kit.calls[0].error, kind)


@pytest.mark.parametrize("returned", [generator, lambda: in_a_pool(lambda: 1 / 0), coroutine_function])
def test_the_kit_waits_for_what_a_function_returns(returned):
    """A call has ended when its work has."""
    function = trigger(column="BASE", name="f")(lambda cell: returned())
    with TriggerKit([function], attempts_max=1) as kit:
        kit.put("6ba7b810-9dad-11d1-80b4-00c04fd430c8", "BASE", {})
        kit.deliver()
        assert len(kit.calls) == 1
        failed = kit.calls[0].error is not None
        assert (len(kit.parked()), kit.counts.called) == (failed, not failed)
        assert failed == (returned is not coroutine_function)


@pytest.mark.parametrize("mark", ['column="B", where="a <"', 'column="1"'])
def test_a_program_with_a_wrong_mark_is_told_to_correct_it(tmp_path, mark):
    """Nobody has sent a request that could be sent again."""
    (tmp_path / "wrong_mark.py").write_text(f"from schemaless import trigger\n\n@trigger({mark})\ndef f(cell): ...\n")
    with pytest.raises(Misconfigured, match=r"wrong_mark.py can't be imported: (where|column)") as raised:
        load_program(str(tmp_path / "wrong_mark.py"))
    assert raised.value.hint == "correct it in the program"


async def test_an_effect_that_nobody_waits_for_in_a_loop_of_the_functions_own_is_a_failed_attempt():
    @trigger(column="BASE")
    def forget(cell, context):
        async def main():
            context.once("mail", coroutine_function)

        asyncio.run(main())

    server = Server()
    bad = server.write(1)
    await asyncio.wait_for(Process(server, 1, [forget], attempts_max=1).pass_by(5.0), 30)
    assert "once('mail') wasn't awaited" in server.parked[bad].error


@pytest.mark.parametrize("way", ["engine", "kit"])
async def test_an_effect_that_nobody_waits_for_is_a_failed_attempt(way):
    """The everyday mistake in an async function: the effect would silently not be made."""

    @trigger(column="BASE")
    async def forget(cell, context):
        context.once("mail", coroutine_function)

    if way == "kit":
        with TriggerKit([forget], attempts_max=1) as kit:
            kit.put("6ba7b810-9dad-11d1-80b4-00c04fd430c8", "BASE", {})
            kit.deliver()
            error = kit.parked()[0].error
    else:
        server = Server()
        bad = server.write(1)
        await asyncio.wait_for(Process(server, 1, [forget], attempts_max=1).pass_by(5.0), 30)
        error = server.parked[bad].error
    assert "once('mail') wasn't awaited" in error
