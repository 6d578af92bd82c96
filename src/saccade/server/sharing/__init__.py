"""What callers share: limits, turns, threads, memory."""
