package authz

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"runtime/debug"
)

// maxRequest bounds what dockerd sends: a body of less than 1 MiB in base64,
// the headers (1 MiB at most), the rest.
const maxRequest = 8 << 20

// Handler answers /AuthZPlugin.AuthZReq with the judge's decision and lets
// every response pass. Each denial is one line in the log. It never fails: a
// request that cannot be read, or a judge that panics, is a refusal.
func Handler(j *Judge) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /AuthZPlugin.AuthZReq", func(w http.ResponseWriter, r *http.Request) {
		var req Request
		var d Decision
		if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxRequest)).Decode(&req); err != nil {
			d = Decision{Rule: "call", Msg: "call: what dockerd says about it cannot be read"}
			slog.Error("authorization request not readable", "err", err)
		} else {
			d = j.decide(req)
		}
		if d.Allow {
			answer(w, reply{Allow: true})
			return
		}
		slog.Warn("call denied", "method", req.RequestMethod, "path", pathOf(req.RequestURI), "user", req.User,
			"rule", d.Rule, "key", d.Key, "why", d.Msg)
		answer(w, reply{Msg: d.Msg})
	})
	mux.HandleFunc("POST /AuthZPlugin.AuthZRes", func(w http.ResponseWriter, r *http.Request) {
		answer(w, reply{Allow: true})
	})
	return mux
}

type reply struct {
	Allow bool
	Msg   string `json:",omitempty"`
}

func answer(w http.ResponseWriter, r reply) {
	w.Header().Set("Content-Type", "application/vnd.docker.plugins.v1.2+json")
	_ = json.NewEncoder(w).Encode(r) // a dockerd that is gone needs none
}

// decide is Judge, except that a panic is a refusal too: a plugin that dies over one call
// would block the calls of all users.
func (j *Judge) decide(r Request) (d Decision) {
	defer func() {
		if v := recover(); v != nil {
			slog.Error("authorization failed", "panic", fmt.Sprint(v), "stack", string(debug.Stack()))
			d = Decision{Rule: "call", Msg: "call: the judge failed over it, see its log"}
		}
	}()
	return j.Judge(r)
}

// pathOf keeps the query, which may hold secrets, out of the log.
func pathOf(uri string) string {
	u, err := url.ParseRequestURI(uri)
	if err != nil {
		return "unreadable"
	}
	return u.Path
}
