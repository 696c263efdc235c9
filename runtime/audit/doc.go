// Package audit records which caller did what to which sandbox.
//
// Log.Observer sees each verb of an Engine. One that may change something leaves a record
// before it begins and another with its outcome; so does what the Engine does by itself,
// such as ending a lease. Verbs that change nothing leave none.
//
// The records are in ROOT/audit: lines of JSON in segments, each named by the
// sequence number of its first. A record has the hash of the one before it, and
// its own: SHA-256, in hexadecimal, of its line up to (and without) `,"hash":`.
// sed and sha256sum can check that; it does not depend on how JSON is written.
// So a record that was changed, removed, inserted or moved is found. That the last
// ones are gone is found by the file head, which has the number and the hash of
// the last record that is known to be on the disk, or by a hash that was noted
// elsewhere. The file ROOT/audit.head says the same, and stays when all of
// ROOT/audit is gone: a log goes on from there, so that the gap is found ever after.
// A process that can write there can forge all of it: only such a note finds that.
//
// The first record of a verb survives this process, the second one, with all
// before it, a power failure: it is on the disk before the caller is told. A verb
// whose first record cannot be written does not begin, unless it is one that
// frees space or stops something. A line that a crash has cut short has no
// newline; the next record tells of it.
package audit
