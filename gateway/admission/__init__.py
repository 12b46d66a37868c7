"""The one choke point of every route: who asks, what they may have, and the one atomic `admit`.

It must not know HTTP or JSON shapes: it takes facts and answers with a `Ticket` or an `ApiError`.

Invariants: A1 nothing reaches the queue without a `Ticket` · A2 a refused request consumed nothing · A3 a tier comes
from the server's record, a request may only ask for a lower one · A4 a wrong key costs no database read per try.
"""
