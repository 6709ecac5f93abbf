"""What commands run that need the packages of the extra ``cli``: models and data by name, training, evaluation, profiling."""
