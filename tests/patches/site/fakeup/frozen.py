"""A binding that cannot be rewritten."""


def pair(x):
    return f"pair {x}"


TABLE = (pair, 1)
