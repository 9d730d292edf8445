"""The first kernel of the series, the weighted sum of the rows of a matrix, in Triton, in TileLang and in CuTe DSL."""
