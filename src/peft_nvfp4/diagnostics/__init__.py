"""Measuring and explaining: quantisation statistics, heat maps, the doctor."""
