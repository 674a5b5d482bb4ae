"""What any process needs: clocks, tasks, child processes, restarts, scratch directories and an end in bounded time.

Every room with a process of its own uses it.
"""
