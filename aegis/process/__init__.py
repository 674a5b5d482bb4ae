"""Parts that any process needs: clocks, tasks, children, restarts, scratch directories, an end in bounded time.

Every room with a process of its own uses it.
"""
