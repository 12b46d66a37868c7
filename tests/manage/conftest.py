"""Models can be imported once Django is set up; the environment is already the tests' own."""

import django

django.setup()
