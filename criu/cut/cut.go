// Package cut blocks all packets of a network namespace, with an nftables table inside it:
// Begin adds the table, End removes it. Devices, addresses and routes stay as they are, and
// traffic over lo passes.
package cut

import (
	"errors"
	"os"
	goruntime "runtime"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// name is the table's.
const name = "agentbox-cut"

// Possible reports whether Begin works here. It tries in a throwaway network namespace: a kernel
// may have nf_tables without the table family that Begin needs.
func Possible() bool {
	done := make(chan bool)
	go func() {
		// Its thread ends with it, and the namespace with that.
		goruntime.LockOSThread()
		if unix.Unshare(unix.CLONE_NEWNET) != nil {
			done <- false
			return
		}
		ns, err := os.Open("/proc/thread-self/ns/net")
		if err == nil {
			err = errors.Join(Begin(ns), ns.Close())
		}
		done <- err == nil
	}()
	return <-done
}

// Begin cuts a network namespace off; ns is its file.
func Begin(ns *os.File) error {
	conn, err := nftables.New(nftables.WithNetNSFd(int(ns.Fd())))
	if err != nil {
		return err
	}
	table := conn.AddTable(&nftables.Table{Name: name, Family: nftables.TableFamilyINet})
	for name, hook := range map[string]*nftables.ChainHook{
		"in": nftables.ChainHookInput, "out": nftables.ChainHookOutput,
	} {
		chain := conn.AddChain(&nftables.Chain{
			Name: name, Table: table, Type: nftables.ChainTypeFilter, Hooknum: hook,
			Priority: nftables.ChainPriorityRaw,
		})
		key := expr.MetaKeyIIFNAME
		if name == "out" {
			key = expr.MetaKeyOIFNAME
		}
		lo := make([]byte, unix.IFNAMSIZ)
		copy(lo, "lo")
		conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
			&expr.Meta{Key: key, Register: 1},
			&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: lo},
			&expr.Verdict{Kind: expr.VerdictDrop},
		}})
	}
	return conn.Flush()
}

// End ends the cut of a network namespace. Without one it does nothing.
func End(ns *os.File) error {
	conn, err := nftables.New(nftables.WithNetNSFd(int(ns.Fd())))
	if err != nil {
		return err
	}
	tables, err := conn.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return err
	}
	at := slices.IndexFunc(tables, func(t *nftables.Table) bool { return t.Name == name })
	if at < 0 {
		return nil
	}
	conn.DelTable(tables[at])
	return conn.Flush()
}

// lockPrefix begins the name of the table by which CRIU holds a network still.
const lockPrefix = "CRIU-"

// Unlock removes the lock that a killed CRIU left on a network namespace.
func Unlock(ns *os.File) error {
	conn, err := nftables.New(nftables.WithNetNSFd(int(ns.Fd())))
	if err != nil {
		return err
	}
	tables, err := conn.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return err
	}
	for _, t := range tables {
		if strings.HasPrefix(t.Name, lockPrefix) {
			conn.DelTable(t)
		}
	}
	return conn.Flush()
}
