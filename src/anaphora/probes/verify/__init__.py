"""Does prefix caching work here, and how much does it save?"""
