"""Tells how a run went, so that its steps can be learned from; telling it twice changes nothing.

usage: python feedback.py   with `magnitude serve` running, or MAGNITUDE_ENDPOINT set
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from magnitude_engine import MagnitudeClient

SESSION = "example-feedback"


async def main() -> None:
    client = MagnitudeClient()
    step = await client.generate_optimized(
        session_id=SESSION, prompt="Goal: add 2 and 2\nThought:", temperature=0.0, max_tokens=24, track_feedback=True
    )
    right = "4" in step["text"]
    told = await client.submit_telemetry_feedback(
        {
            "session_id": SESSION,
            "success": right,
            "error_reason": None if right else "the sum is not in the answer",
            "timestamp": datetime.now(UTC).isoformat(),
        }
    )
    print(told["status"])
    report = await client.session(SESSION).report()
    print("steps credited:", sum(kept.success is right for kept in report.tracked_steps))


if __name__ == "__main__":
    asyncio.run(main())
