"""Operations on nodes that need more than one level or leaf, one concept for each module."""
