"""One attempt at a delivery, whatever the receiver's code does: it may be another package's.

Of what it raises only the kind is said: the text may hold the URL.
"""

from __future__ import annotations

import asyncio
import logging

from sentinel.notify import Delivery, Message, Route

log = logging.getLogger(__name__)

FAULTS = (Exception, SystemExit, asyncio.CancelledError)
"""Of somebody else's code: what it waited for may be cancelled, without this task."""
CLOSE_SECONDS = 1.0
"""That a receiver may take to let go of what it holds open."""


async def attempt(route: Route, message: Message) -> Delivery:
    """Deliver once, within the receiver's time. Raises nothing but CancelledError, where this task is cancelled."""
    try:
        async with asyncio.timeout(route.timeout):
            delivery: object = await route.receiver.deliver(message)
    except TimeoutError:
        return Delivery(fault="timeout", detail=f"no answer within {route.timeout:g} s", retry=True)
    except FAULTS as error:
        if _is_cancelled():
            raise
        return Delivery(fault="internal", detail=f"{type(error).__name__} in its code", retry=True)
    if isinstance(delivery, Delivery):
        return delivery
    kind = type(delivery).__name__  # it may well be there: to send it for a day would be worse than to say so
    return Delivery(fault="internal", detail=f"its code answers {kind} and no Delivery")


async def close(route: Route) -> None:
    """Have it let go of what it holds open. Does not raise either, nor wait for ever."""
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await route.receiver.close()
    except FAULTS as error:
        if _is_cancelled():
            raise
        log.error("receiver %s: %s when it was closed", route.name, type(error).__name__)


def _is_cancelled() -> bool:
    """Whether the present task is; not only what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
