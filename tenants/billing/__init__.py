"""Money: the price book, rating, the double-entry ledger, usage records and the proof that they agree.

It must not know HTTP, Redis or how tokens are made; it is told what was used and answers what that costs.

Invariants (tests cite the numbers)
I1 every transaction's entries sum to zero
I2 rows are never updated or deleted; a correction is a reversing transaction that names what it corrects
I3 one settlement per request id, whatever is redelivered
I4 a price version is immutable once published, versions of one price never overlap, and a request is rated with
   the version in force when it was admitted
I5 money is Decimal / NUMERIC and a JSON string outside; rounded half-even once per invoice line, the residue posted
I6 usage = ledger quantities, in tokens and in money; `reconcile` proves it or shows rows
"""
