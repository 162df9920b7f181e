"""The history of the store's tables, for Alembic. A script that was released is never changed."""
