// Command ping keeps a loopback connection busy and stores what came of it: the count in
// /count, and /broken once an answer was not what was said.
package main

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"time"
)

func main() {
	l, err := net.Listen("tcp", "127.0.0.1:7777")
	if err != nil {
		panic(err)
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				continue
			}
			go func() {
				for s := bufio.NewScanner(c); s.Scan(); {
					fmt.Fprintln(c, s.Text())
				}
			}()
		}
	}()
	c, err := net.Dial("tcp", "127.0.0.1:7777")
	if err != nil {
		panic(err)
	}
	count, err := os.Create("/count")
	if err != nil {
		panic(err)
	}
	in := bufio.NewReader(c)
	for i := 1; ; i++ {
		fmt.Fprintln(c, i)
		line, err := in.ReadString('\n')
		if err != nil || line != fmt.Sprintln(i) {
			os.WriteFile("/broken", []byte(fmt.Sprint(i, line, err)), 0644)
			select {}
		}
		count.WriteAt(fmt.Appendf(nil, "%08d", i), 0) // of one size, however it is dumped
		time.Sleep(20 * time.Millisecond)
	}
}
