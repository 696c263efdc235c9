// Package doctor has the words for what this host can do and what it lacks: a report of
// checks. Package checks makes one.
package doctor

// Status of a check.
type Status string

// The states of a check.
const (
	OK   Status = "ok"
	Warn Status = "warn"
	Fail Status = "fail"
)

// Check is one precondition. Its JSON is documented and only ever grows.
type Check struct {
	Name   string `json:"name"`             // stable, e.g. "overlayfs"
	Status Status `json:"status"`           // "ok", "warn", "fail"
	Detail string `json:"detail"`           // what was found, one line
	Remedy string `json:"remedy,omitempty"` // what to do, one line; empty when ok
}

// Report is all of them, in a fixed order.
type Report struct {
	Checks []Check `json:"checks"`
	OK     bool    `json:"ok"` // none failed
}
