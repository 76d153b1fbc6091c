"""Effects once: an outside effect happens at most once for a cell, whatever fails where, and every doubt is told."""

import asyncio
import concurrent.futures
import itertools
import uuid
from datetime import UTC, datetime

import pytest

from schemaless import Conflict, Context, DidNotHappen, Doubt, Park, Retry
from schemaless.cell import CellKey, PutStatus, parse_cause
from schemaless.client.answers import PutAnswer, VersionsPage
from schemaless.errors import Corrupt, Forbidden, Misconfigured, Unavailable
from schemaless.found_cell import FoundCell
from schemaless.location import Location, ShardLocation
from schemaless.triggers.context import ContextServices
from schemaless.triggers.effects import RESULT_BYTES_MAX, SETTLE_S, Ledger

ROW = uuid.UUID("6ba7b810-9dad-11d1-80b4-00c04fd430c8")
KEY = CellKey(ROW.bytes, "BASE", 1)
BUFFERED = "buffered"


class Crash(BaseException):
    """The process is killed here."""


class Cells:
    """The client of a store with one row. `faults` are what the next puts meet, in order: None, BUFFERED or an error.

    A put that meets an error after `lands` is durable all the same.
    """

    def __init__(self):
        self.now = 1_000_000.0
        self.cells = {}
        self.buffered = {}
        self.faults = []
        self.lands = False
        self.read_fault = None

    def put_cell(self, row_key, column, ref_key, body):
        assert row_key == str(ROW)
        fault = self.faults.pop(0) if self.faults else None
        if fault is None or self.lands:
            known = self.cells.get((column, ref_key))
            if known is not None and known.body != body:
                raise Conflict("another body")
            self.cells.setdefault(
                (column, ref_key),
                FoundCell(ROW, column, ref_key, body, 0, 1, 1, datetime.fromtimestamp(self.now, UTC)),
            )
        if fault == BUFFERED:
            self.buffered[column, ref_key] = body
            return PutAnswer(ROW, column, ref_key, PutStatus.BUFFERED, 0, 1)
        if fault is not None:
            raise fault
        return PutAnswer(ROW, column, ref_key, PutStatus.STORED, 0, 2)

    def get_versions(self, row_key, column, *, from_, to, order, limit, read_from):
        assert (order, limit, read_from) == ("desc", 1, "master")
        if self.read_fault is not None:
            raise self.read_fault
        found = [cell for (name, n), cell in self.cells.items() if name == column and from_ <= n <= to]
        return VersionsPage(sorted(found, key=lambda cell: -cell.ref_key)[:1])

    @property
    def states(self):
        return [cell.body["state"] for _, cell in sorted(self.cells.items())]


class AsyncCells:
    def __init__(self, cells):
        self._cells = cells

    async def put_cell(self, *args):
        return self._cells.put_cell(*args)

    async def get_versions(self, *args, **options):
        return self._cells.get_versions(*args, **options)


class Provider:
    """A card processor. `outcomes` are what its next charges come to, in order: an error, or the charge's number."""

    def __init__(self):
        self.charges = 0
        self.outcomes = []

    def charge(self):
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if isinstance(outcome, DidNotHappen):
            raise outcome
        self.charges += 1
        if outcome is not None:
            raise outcome
        return {"number": self.charges}


class Process:
    """A process with a trigger function, sync or async, over the cells. Its memory ends with it."""

    def __init__(self, cells, provider, is_async=False):
        self.provider = provider
        self.is_async = is_async
        self.services = ContextServices("mezzanine", Ledger(lambda: cells.now))
        self.services.client = cells
        self.services.async_client = AsyncCells(cells)

    def context(self, cell=KEY, function="bill_rider", program="billing"):
        return Context(program, "mezzanine", 1, function, cell, self.services)

    def run(self, effect="charge", resolve=None, call=None, **identity):
        """Calls the function once."""
        context, call = self.context(**identity), call or self.provider.charge
        if not self.is_async:
            return context.once(effect, call, resolve)

        def made_async(function):
            async def called():
                return function()

            return called

        async def function():
            return await context.once(effect, made_async(call), resolve and made_async(resolve))

        return asyncio.run(function())


@pytest.fixture
def cells():
    return Cells()


@pytest.fixture
def provider():
    return Provider()


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def process(request, cells, provider):
    return Process(cells, provider, request.param)


def another(process, cells):
    return Process(cells, process.provider, process.is_async)


def test_a_repeat_returns_the_stored_result_without_the_call(process, cells, provider):
    """In the same process and in another one, after any time."""
    assert process.run() == process.run() == another(process, cells).run() == {"number": 1}
    assert provider.charges == 1
    assert cells.states == ["intent", "happened"]


@pytest.mark.parametrize("result", [None, False, 0, "", [], {"a": [1, 2.5, None, "é"]}])
def test_every_json_value_is_a_result(process, cells, result):
    """Empty ones too: they say that it happened."""
    calls = []
    for worker in (process, another(process, cells)):
        assert worker.run(call=lambda: calls.append(1) or result) == result
    assert len(calls) == 1


def test_effects_are_apart_by_name_function_program_and_cell(process, provider):
    """Each has its own entries and its own key. The attempt and the location count for nothing."""
    identities = [
        {}, {"effect": "notify"}, {"function": "other"}, {"program": "b2"}, {"cell": CellKey(ROW.bytes, "BASE", 2)},
        {"cell": CellKey(ROW.bytes, "STATUS", 1)},
    ]  # fmt: skip
    results = [process.run(**identity) for identity in identities]
    assert [result["number"] for result in results] == [1, 2, 3, 4, 5, 6]
    assert [process.run(**identity) for identity in identities] == results
    keys = []
    for identity in identities:
        named = {name: value for name, value in identity.items() if name != "effect"}
        keys.append(process.context(**named).idempotency_key(identity.get("effect", "charge")))
    assert len(set(keys)) == len(keys)
    again = Context("billing", "mezzanine", 7, "bill_rider", CellKey(ROW.bytes, "BASE", 1))
    assert again.idempotency_key("charge") == keys[0]
    assert len(keys[0]) == 32


def test_the_key_of_an_effect_never_changes():
    """Providers remember it, and so do the entries that are stored."""
    context = Context("billing", "mezzanine", 1, "bill_rider", KEY)
    assert context.idempotency_key("charge") == "7ae3cf094c4bf5c8f73912c751825dd7"


def test_a_program_with_a_long_name_has_a_column_of_its_own(process, cells):
    """A column has at most 64 characters, and a program up to 100."""
    for name in ("p" * 100, "p" * 99 + "q"):
        process.run(program=name)
    assert len({column for column, _ in cells.cells}) == 2
    assert all(len(column) <= 64 for column, _ in cells.cells)


def test_a_crash_before_the_result_is_a_doubt(process, cells, provider):
    """The call may have happened. It isn't repeated, and the reason says what people do."""
    provider.outcomes = [Crash()]
    with pytest.raises(Crash):
        process.run()
    cells.now += SETTLE_S
    for _ in range(2):
        with pytest.raises(Doubt, match="doubt: charge of bill_rider") as caught:
            another(process, cells).run()
    assert isinstance(caught.value, Park)
    assert process.context().idempotency_key("charge") in caught.value.reason
    assert provider.charges == 1


@pytest.mark.parametrize(("body", "charges"), [({"state": "happened", "result": 7}, 1), ({"state": "withdrawn"}, 2)])
def test_people_settle_a_doubt_with_a_cell(process, cells, provider, body, charges):
    """The reason names it. After that the effect is finished, or made anew."""
    provider.outcomes = [Crash()]
    with pytest.raises(Crash):
        process.run()
    with pytest.raises(Doubt) as caught:
        process.run()
    column, ref_key = caught.value.reason.split(" as ")[1].split(" of ")[0].split()
    cells.put_cell(str(ROW), column, int(ref_key), body)
    assert process.run() == (7 if charges == 1 else {"number": 2})
    assert provider.charges == charges


def test_an_error_of_the_call_leaves_a_doubt_unless_it_says_that_nothing_happened(process, cells, provider):
    """A time-out says nothing about the charge. DidNotHappen does, and the next attempt makes the call again."""
    provider.outcomes = [DidNotHappen("TRY AGAIN"), DidNotHappen("TRY AGAIN"), TimeoutError("no answer")]
    for _ in range(2):
        with pytest.raises(DidNotHappen, match="TRY AGAIN"):
            process.run()
    assert cells.states == ["intent", "withdrawn"] * 2
    with pytest.raises(TimeoutError):
        process.run()
    with pytest.raises(Doubt):
        process.run()
    assert provider.charges == 1


def test_resolve_asks_the_provider_and_its_answer_is_stored(process, cells, provider):
    """It is asked only when there is a doubt, and once."""
    asked = []
    provider.outcomes = [TimeoutError()]
    with pytest.raises(TimeoutError):
        process.run(resolve=lambda: asked.append(1) or {"number": 1})
    assert asked == []
    for _ in range(2):
        assert process.run(resolve=lambda: asked.append(1) or {"number": 1}) == {"number": 1}
    assert (asked, provider.charges) == ([1], 1)


def test_resolve_may_say_that_it_did_not_happen(process, cells, provider):
    """Then the intent is withdrawn, and the call is made in the same attempt."""

    def resolve():
        raise DidNotHappen("no such charge")

    provider.outcomes = [TimeoutError()]
    with pytest.raises(TimeoutError):
        process.run()
    assert process.run(resolve=resolve) == {"number": 2}
    assert cells.states == ["intent", "withdrawn", "intent", "happened"]


def test_a_resolve_that_raises_is_a_failed_call_and_leaves_the_doubt(process, cells, provider):
    """The next attempt asks again."""

    def broken():
        raise ConnectionError("the provider is down")

    provider.outcomes = [TimeoutError()]
    with pytest.raises(TimeoutError):
        process.run()
    for _ in range(2):
        with pytest.raises(ConnectionError):
            process.run(resolve=broken)
    assert cells.states == ["intent"]
    assert process.run(resolve=lambda: "found") == "found"


@pytest.mark.parametrize("fault", [BUFFERED, Unavailable("503")])
@pytest.mark.parametrize("lands", [False, True])
def test_an_intent_counts_only_when_it_is_stored(process, cells, provider, fault, lands):
    """After 202 and 503 nothing is called. The same process goes on with it later, for its call never began."""
    cells.faults, cells.lands = [fault], lands
    with pytest.raises((Retry, Unavailable)):
        process.run()
    assert provider.charges == 0
    cells.lands = False
    assert process.run() == {"number": 1}
    assert cells.states == ["intent", "happened"]


def test_an_intent_of_a_process_that_died_before_the_call_is_a_doubt(process, cells, provider):
    """Nobody else can know that the call never began."""
    cells.faults, cells.lands = [Unavailable("503")], True
    with pytest.raises((Retry, Unavailable)):
        process.run()
    cells.now += SETTLE_S
    with pytest.raises(Doubt):
        another(process, cells).run()
    assert provider.charges == 0


def test_of_two_owners_one_makes_the_call(process, cells, provider):
    """Both saw nothing. The nonce makes the second one's intent another body, which is a conflict."""
    second = another(process, cells)

    def first_owner_is_slow():
        with pytest.raises((Retry, Unavailable)):
            second.run()  # the intent is young: its call may still be under way
        return provider.charge()

    if process.is_async:
        process.is_async = second.is_async = False  # one loop can't run in another
    assert process.run(call=first_owner_is_slow) == {"number": 1}
    assert second.run() == {"number": 1}
    assert provider.charges == 1


def test_an_intent_that_meets_another_is_not_ours(process, cells, provider, monkeypatch):
    """Even when both have read that there is none."""
    second = another(process, cells)
    monkeypatch.setattr(cells, "get_versions", lambda *_, **__: VersionsPage([]))
    cells.faults = [None, Unavailable("the first owner is killed")]
    with pytest.raises((Retry, Unavailable)):
        process.run()
    with pytest.raises((Retry, Unavailable)):
        second.run()
    assert provider.charges == 1


@pytest.mark.parametrize("lands", [False, True])
def test_a_result_that_could_not_be_stored_is_kept_by_its_process(process, cells, provider, lands):
    """Until it is. Another process has a doubt meanwhile, or finds the result where it did get through."""
    cells.faults, cells.lands = [None, Unavailable("503")], lands
    with pytest.raises((Retry, Unavailable)):
        process.run()
    cells.now += SETTLE_S
    if not lands:
        with pytest.raises(Doubt):
            another(process, cells).run()
    assert process.run() == another(process, cells).run() == {"number": 1}
    assert provider.charges == 1


def test_a_buffered_result_is_durable_so_it_is_enough(process, cells, provider):
    """The function goes on."""
    cells.faults = [None, BUFFERED]
    assert process.run() == {"number": 1}


def test_a_withdrawal_that_could_not_be_stored_is_no_doubt_for_its_process(process, cells, provider):
    """It knows that nothing happened."""
    cells.faults = [None, Unavailable("503")]
    provider.outcomes = [DidNotHappen("TRY AGAIN")]
    with pytest.raises(DidNotHappen):
        process.run()
    assert process.run() == {"number": 1}


def test_a_result_that_people_settled_otherwise_is_a_doubt(process, cells, provider):
    """They said that it didn't happen, while the call was under way."""

    def settled_meanwhile():
        ((column, ref_key),) = cells.cells
        cells.put_cell(str(ROW), column, ref_key + 1, {"state": "withdrawn"})
        return provider.charge()

    with pytest.raises(Doubt, match="withdrawn"):
        process.run(call=settled_meanwhile)


def test_a_store_that_cannot_be_read_is_waited_for(process, cells, provider):
    """Nothing is called. An error that won't pass is a failed call."""
    cells.read_fault = Unavailable("503")
    with pytest.raises((Retry, Unavailable)):
        process.run()
    cells.read_fault = Forbidden("the token may only read")
    with pytest.raises(Forbidden):
        process.run()
    assert provider.charges == 0


@pytest.mark.parametrize(
    ("result", "why"),
    [
        ("x" * RESULT_BYTES_MAX, "bytes, and at most"),
        ({1, 2}, "is no JSON value"),
        ({1: 2}, "is no JSON value"),
        ((1, 2), "is no JSON value"),
        (float("nan"), "is no JSON value"),
        (b"bytes", "is no JSON value"),
        ("\ud800", "is no JSON value"),
        (object(), "is no JSON value"),
    ],
    ids=["large", "set", "int keys", "tuple", "nan", "bytes", "surrogate", "object"],
)
def test_a_result_that_cannot_be_stored_parks_the_cell_and_is_not_repeated(process, cells, result, why):
    """The effect happened: that much is stored."""
    calls = []
    for _ in range(2):
        with pytest.raises(Park, match=why):
            process.run(call=lambda: calls.append(1) or result)
    assert len(calls) == 1


def test_one_name_twice_in_a_call_is_refused(process, provider):
    """The second effect would silently get the result of the first."""
    process.is_async = False
    context = process.context()
    context.once("charge", provider.charge)
    context.once("notify", provider.charge)
    with pytest.raises(Misconfigured, match="twice"):
        context.once("charge", provider.charge)
    assert provider.charges == 2


@pytest.mark.parametrize("effect", ["", "e" * 101, None, 7])
def test_an_effect_needs_a_name(process, effect):
    """And a context needs a cell."""
    with pytest.raises(Misconfigured, match="effect"):
        process.context().once(effect, lambda: 1)
    with pytest.raises(Misconfigured, match="cell"):
        Context("billing", "mezzanine", 1).idempotency_key("charge")


def test_an_effect_that_returns_work_which_has_not_begun_did_not_happen(process, cells):
    """Nobody would do it. So the intent is withdrawn, and a corrected function makes the effect."""
    with pytest.raises(DidNotHappen, match="returned generator, which is work that hasn't begun"):
        process.run(call=lambda: (number for number in [1]))
    assert cells.states == ["intent", "withdrawn"]
    if not process.is_async:
        made = asyncio.sleep(0)
        with pytest.raises(DidNotHappen, match="In a sync function the call is sync, too"):
            process.context().once("charge", lambda: made)
        made.close()
    assert process.run() == {"number": 1}


def test_the_future_of_an_executor_is_the_call(process, cells):
    """Its result is that of the effect."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert process.run(call=lambda: pool.submit(lambda: 7)) == 7
    assert cells.states == ["intent", "happened"]


@pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration, GeneratorExit, SystemExit])
def test_whatever_the_call_raises_leaves_a_doubt(process, cells, kind):
    """Also what ends generators: the function doesn't go on as if the effect had been made."""

    def fail():
        raise kind

    with pytest.raises((kind, RuntimeError)):  # a coroutine can't raise StopIteration
        process.run(call=fail)
    assert cells.states == ["intent"]


def test_a_foreign_cell_among_the_entries_is_never_taken_for_one(process, cells):
    """Somebody wrote into the column, or two keys met."""
    process.run()
    (column, ref_key), *_ = sorted(cells.cells)
    for body in ({"state": "happened", "effect": "other"}, {"state": "paid"}, {}):
        cells.cells[column, ref_key + 1] = FoundCell(ROW, column, ref_key + 1, body, 0, 1, 1, datetime.now(UTC))
        with pytest.raises(Corrupt, match="no entry"):
            process.run()


def test_whatever_dies_where_nothing_is_charged_twice(cells, provider):
    """Every pair of faults at every put and call: charged at most once, and a missing result is a doubt or a retry."""
    put_faults = [None, BUFFERED, Unavailable("503"), Crash()]
    call_faults = [None, TimeoutError(), DidNotHappen("no"), Crash()]
    for lands, faults, outcome in itertools.product(
        (False, True), itertools.product(put_faults, repeat=3), call_faults
    ):
        store, bank = Cells(), Provider()
        store.faults, store.lands, bank.outcomes = list(faults), lands, [outcome]
        process = Process(store, bank)
        for _ in range(8):
            store.now += SETTLE_S
            try:
                assert process.run() == {"number": 1}
                break
            except (Doubt, Retry, Unavailable, TimeoutError, DidNotHappen):
                continue
            except Crash:
                process = Process(store, bank)
        assert bank.charges <= 1


def test_cells_that_a_call_puts_carry_the_cell_that_caused_them():
    """A15: through both clients, effects' entries too. A context of a test without a location has the plain client."""

    causes = []

    class Asked(Cells):
        def caused_by(self, cause):
            causes.append(cause)
            return self

    services = ContextServices("mezzanine")
    services.client = services.async_client = Asked()
    at = ShardLocation(7, Location(1, 1000))
    context = Context("billing", "mezzanine", 1, services=services).of_call("bill_rider", KEY, at)
    assert context.cause == parse_cause("billing/bill_rider@7:1:1000")
    assert context.client is context.async_client is services.client
    context.once("charge", lambda: 1)
    assert causes == ["billing/bill_rider@7:1:1000"] * 3
    assert Context("billing", "mezzanine", 1, "f", KEY, services).client is services.client
    assert len(causes) == 3
