"""A stop is polite once, and at once the second time."""

import asyncio
import ctypes
import os
import signal

import pytest

from megatron_drmas.cluster.signals import SIGNALS, StopRequest, reinstall_handlers


@pytest.fixture(autouse=True)
def handlers_restored():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number):
    os.kill(os.getpid(), number)


async def soon(stop):
    while stop.requested is None:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_only_asks_while_there_is_something_to_finish(number):
    async def run():
        stop, said = StopRequest(), []
        stop.polite(said.append)
        send(number)
        await soon(stop)
        await asyncio.sleep(0.01)
        assert stop.requested == number.name and not stop.aborted and len(said) == 1 and number.name in said[0]
        stop.close()

    asyncio.run(run())


@pytest.mark.parametrize("second", SIGNALS)
def test_a_second_signal_cancels(second):
    async def run():
        stop = StopRequest()
        stop.polite(lambda text: None)
        send(signal.SIGINT)
        await soon(stop)
        send(second)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(10)
        assert stop.aborted and stop.requested == "SIGINT" and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

    asyncio.run(run())


def test_a_signal_with_nothing_to_finish_cancels():
    async def run():
        stop = StopRequest()
        send(signal.SIGTERM)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(10)
        assert stop.aborted

    asyncio.run(run())


def test_work_that_can_be_done_again_is_given_up_when_asked():
    async def run():
        stop, ended = StopRequest(), []
        stop.polite(lambda text: None)

        async def work(seconds):
            try:
                await asyncio.sleep(seconds)
                ended.append("done")
            except asyncio.CancelledError:
                ended.append("aborted")
                raise

        await stop.unless_requested(work(0))
        asyncio.get_running_loop().call_later(0.02, send, signal.SIGINT)
        await stop.unless_requested(work(10))
        assert ended == ["done", "aborted"]
        stop.close()

    asyncio.run(run())


def test_an_error_of_such_work_is_its_own():
    async def run():
        stop = StopRequest()

        async def work():
            raise ValueError("mine")

        with pytest.raises(ValueError, match="mine"):
            await stop.unless_requested(work())
        stop.close()

    asyncio.run(run())


def test_a_signal_that_the_shell_has_ignored_stays_ignored():
    """A job in the background of a script is not to hear the terminal's Ctrl-C."""

    async def run():
        stop = StopRequest()
        stop.polite(lambda text: None)
        send(signal.SIGINT)
        await asyncio.sleep(0.01)
        assert stop.requested is None and signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        stop.close()

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(run())


def test_a_library_that_takes_a_signal_behind_python_gives_it_back():
    async def run():
        stop = StopRequest()
        stop.polite(lambda text: None)
        ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(signal.SIG_IGN))
        send(signal.SIGTERM)
        await asyncio.sleep(0.01)
        assert stop.requested is None
        reinstall_handlers()
        send(signal.SIGTERM)
        await soon(stop)
        assert stop.requested == "SIGTERM" and not stop.aborted
        stop.close()

    asyncio.run(run())
