"""An engine that only keeps time, for measuring what stands in front of one: the same clock behind the queue and HTTP.

It must not know the scheduler or any model: nothing in it may take longer because there is more of it.
"""
