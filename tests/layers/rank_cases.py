"""All cases for ranks on a CPU, so that processes start only once. Cases with stand-ins for kernels come last."""

from tests.layers import rank_collectives, rank_symmetric

CASES = rank_collectives.CASES | {f"symmetric memory: {name}": case for name, case in rank_symmetric.CASES.items()}
