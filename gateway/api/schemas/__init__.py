"""What a request body may be, stated once: types, bounds and the rules between fields.

It must not know models, tenants or tokens; what depends on those is checked where they are known.
"""
