"""Bundles: a float model beside a file of ranges, as the tools of many vendors read them."""
