"""Programs that a model wrote, run where they can do no harm: without network or files, under limits, killed as a whole."""
