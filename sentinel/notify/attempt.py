"""One attempt at a delivery, whatever the receiver's code does: it may be another package's.

Of what it raises only the kind is said: the text may hold the URL.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from sentinel.notify import DELIVERED, Delivery, Message, Route

log = logging.getLogger(__name__)

FAULTS = (Exception, SystemExit, asyncio.CancelledError)
"""Faults of a plugin's code: what it waited for may be cancelled, without this task."""
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
        return delivery if _is_sound(delivery) else _unsound(route, delivery)
    kind = type(delivery).__name__  # it may well be there: to send it for a day would be worse than to say so
    return Delivery(fault="internal", detail=f"its code answers {kind} and no Delivery")


def _is_sound(delivery: Delivery) -> bool:
    """Whether its fields have their types, which is not checked before: an `after` from a header may be text."""
    try:
        return msgspec.convert(msgspec.to_builtins(delivery), Delivery).after >= 0.0
    except (msgspec.MsgspecError, TypeError):
        return False


def _unsound(route: Route, delivery: Delivery) -> Delivery:
    """The pipeline could not go on with it, nor another daemon read it from the outbox."""
    log.error("receiver %s: its code returned a Delivery with a field of the wrong type", route.name)
    if delivery.fault is None:
        return DELIVERED
    return Delivery(fault="internal", detail="its code returned something other than a Delivery", retry=True)


async def close(route: Route) -> None:
    """Have it let go of what it holds open. Does not raise either, nor wait without end."""
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
