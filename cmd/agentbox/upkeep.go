package main

import (
	"context"
	"time"

	"github.com/docker/go-units"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api/server"
	"github.com/agentbox/agentbox/runtime/engine"
)

// upkeepOptions are what serve does by itself.
type upkeepOptions struct {
	Reconcile time.Duration
	Prune     time.Duration
	Rate      string

	rate int64
}

func (o *upkeepOptions) addFlags(fl *pflag.FlagSet) {
	fl.DurationVar(&o.Reconcile, "reconcile", time.Minute,
		"compare the records with what there is each `DURATION`; 0: never")
	fl.DurationVar(&o.Prune, "prune", 10*time.Minute,
		"apply the retention rules of the policies each `DURATION`; 0: never")
	fl.StringVar(&o.Rate, "prune-rate", "32m", "`SIZE` a second that pruning may copy; 0: no bound")
}

func (o *upkeepOptions) check() (err error) {
	if o.rate, err = units.RAMInBytes(o.Rate); err != nil || o.rate < 0 || o.Reconcile < 0 || o.Prune < 0 {
		return usageErrorf("--reconcile %v, --prune %v, --prune-rate %q: durations such as 1m, and a size such as 32m",
			o.Reconcile, o.Prune, o.Rate)
	}
	return nil
}

// recoverer is a Service that finds what killed processes have left, as every
// embedded engine does when it is opened.
type recoverer interface {
	RecoverInterrupted(ctx context.Context) (runtime.Recovery, error)
	ReviveOfBoot(ctx context.Context) error
}

// An upkeeper is a Service that does things by itself. Only one that runs on
// this host is one.
type upkeeper interface {
	Upkeep(ctx context.Context, u engine.Upkeep)
}

// tend does beside all else what a service does by itself, until stop, which waits
// for what is under way. Other commands leave it to the service.
func (o *upkeepOptions) tend(ctx context.Context, svc runtime.Service, figures *server.Metrics) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var all guard.WaitGroup
	if k, ok := svc.(upkeeper); ok {
		u := engine.Upkeep{Reconcile: o.Reconcile, Prune: o.Prune, Rate: o.rate}
		u.Reconciled = func(out runtime.ReconcileReport, _ error) {
			for _, f := range out.Findings {
				if !f.Again { // one that stays is one
					figures.Leak(f.Kind)
				}
			}
		}
		all.Go(func() { k.Upkeep(ctx, u) })
	}
	return func() { cancel(); all.Wait() }
}
