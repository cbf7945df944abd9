"""Launchers: where the components of a program run. One file each; the parts do not know which one
placed them.
"""
