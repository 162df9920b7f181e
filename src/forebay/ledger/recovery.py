"""At the start: what the last process left in its journal goes into the store, and its leases are given back."""

from __future__ import annotations

import logging

from forebay.ledger.database import StoreError
from forebay.ledger.journal import METERED, PREPAID, Frame, Journal, Leftover
from forebay.ledger.posting import Posting, Tally

log = logging.getLogger(__name__)

_Streams = dict[int, tuple[int, str, int, int, str]]
"""By number: what was metered of streams that had not ended, and when."""


def recover(journal: Journal, posting: Posting) -> int:
    """Post what is left in the journal's folder. Returns how many settlements that were.

    A stream that was open is settled with what it was last metered at. Raises StoreError when the journal belongs to
    another store.
    """
    left = journal.leftover()
    if left is None:
        journal.clear(keep_damaged=False)
        return 0
    posted = posting.posted(left.journal)
    if posted is None:
        raise StoreError(
            f"the journal {journal.folder} belongs to another store than {posting.database.name}; start with that one "
            "to post what it holds, or move the folder away to give it up"
        )
    last, tally = _unposted(left, posted)
    upto = last + 1  # the streams that were open are settled once, as a frame of their own
    if posted >= upto:
        upto, tally = posted, Tally()
    returned = posting.finish(left.journal, posted, upto, tally)
    for text in left.damaged:
        log.error("the journal %s is damaged: %s; it is kept beside it as .damaged", journal.folder, text)
    journal.clear(keep_damaged=bool(left.damaged))
    if tally.settlements or returned:
        log.info("recovered %d settlements from the journal, and gave %d leases back", tally.settlements, returned)
    return tally.settlements


def _unposted(left: Leftover, posted: int) -> tuple[int, Tally]:
    """The number of the last frame, and what the store does not have yet."""
    last, tally = posted, Tally()
    open_streams: _Streams = {}
    for frame in left.frames():
        last = frame.number
        _read(frame, frame.number > posted, tally, open_streams)
    for at_ms, key, tokens_in, tokens_out, model in open_streams.values():
        tally.add(key, at_ms, tokens_in, tokens_out, True, model)
    return last, tally


def _read(frame: Frame, new: bool, tally: Tally, open_streams: _Streams) -> None:
    for kind, key, number, tokens_in, tokens_out, model in frame.records:
        if kind == METERED:
            open_streams[number] = (frame.at_ms, key, tokens_in, tokens_out, model)
    for kind, key, number, tokens_in, tokens_out, model in frame.records:
        if kind != METERED:
            open_streams.pop(number, None)
            if new:
                tally.add(key, frame.at_ms, tokens_in, tokens_out, kind == PREPAID, model)
