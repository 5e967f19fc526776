import data  # noqa: F401, sets how threads wait, which must come before the first import of torch
