"""Operations written for tiles and chunks: attention, and the loss from hidden states.

Nothing here knows the store, the tape or a model.
"""
