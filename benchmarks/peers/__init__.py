"""The worker processes of the comparisons, one module for each contender; those of other libraries import no mint."""
