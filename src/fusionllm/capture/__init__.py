"""From a model to an OpGraph and back: export, sources of models, weights. Needs torch; opens no sockets."""
