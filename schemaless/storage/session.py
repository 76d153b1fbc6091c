"""What every connection is set to, by either driver.

READ COMMITTED: a statement after the lock must see what the lock protects, not a snapshot from before it was
given (I3). UTC: created_at is (I4). Strict: a value that doesn't fit is an error, never cut. A client that vanished
without a word, or stands still, must not hold a head's lock for eight hours, MySQL's default: a minute; on MariaDB,
which tells idle transactions from idle connections, seconds (I14).
"""

SESSION = (
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED;"
    "SET time_zone = '+00:00', sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', innodb_lock_wait_timeout = 3,"
    " wait_timeout = 60 /*M! , idle_transaction_timeout = 5 */"
)
